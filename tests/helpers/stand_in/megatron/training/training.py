"""Builds the chunks of a model through a function that builds one."""

from typing import Any


def get_model(model_provider_func: Any, model_type: Any = None, wrap_with_ddp: bool = True) -> list[Any]:
    """As upstream, without a pipeline around it: each chunk as of the first rank of Megatron's own placement."""
    chunks = range(2)
    return [model_provider_func(pre_process=i == 0, post_process=False, vp_stage=i) for i in chunks]
