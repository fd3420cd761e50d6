"""Build the model's chunks with a function that builds one chunk."""

from typing import Any


def get_model(model_provider_func: Any, model_type: Any = None, wrap_with_ddp: bool = True) -> list[Any]:
    """Build two chunks as upstream does on the first rank of Megatron's own placement, without process groups."""
    chunks = range(2)
    return [model_provider_func(pre_process=i == 0, post_process=False, vp_stage=i) for i in chunks]


def build_train_valid_test_data_iterators(build_train_valid_test_datasets_provider: Any) -> list[Any]:
    """Stands in for Megatron-LM's function; builds nothing."""
    return []
