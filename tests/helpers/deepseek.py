"""Build models with what DeepSeek-V3 has and our training loop has no flags for, such as latent attention.

The functions of ``parity`` and ``slices`` then train them, in place of a GPT with plain attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest


class Model(NamedTuple):
    """What a model has in addition to what its flags say.

    Attributes:
        latent: whether its attention is multi-head latent attention.
        predictions: layers of multi-token prediction.
        fields: more fields of megatron-core's configuration.
        changes: fields that its configuration gets when it is built, because our flags reject their values.
    """

    latent: bool = False
    predictions: int = 0
    fields: tuple[tuple[str, Any], ...] = ()
    changes: tuple[tuple[str, Any], ...] = ()


_LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 5,
    "rope_type": "rope",
}


@contextmanager
def built(of: Model) -> Iterator[None]:
    """Context in which our training loop builds such a model."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer import MLATransformerConfig

    from megatron.zero_bubble.planning.job.arguments import parser as arguments
    from pretrain import model

    parse, build_config, build_gpt = arguments.parse, model.build_config, model.GPTModel
    fields = {**(_LATENT if of.latent else {}), **dict(of.fields)}
    if of.predictions:
        fields |= {"mtp_num_layers": of.predictions, "mtp_loss_scaling_factor": 0.1}

    def parse_more(argv: Sequence[str]) -> Any:
        args = parse(argv)
        for name, value in fields.items():
            setattr(args, name, value)
        return args

    def build_changed(*args: Any) -> Any:
        config = build_config(*args)
        for name, value in of.changes:
            setattr(config, name, value)
        return config

    def build_predicting(config: Any, transformer_layer_spec: Any, vp_stage: int | None, **rest: Any) -> Any:
        block = gpt_layer_specs.get_gpt_mtp_block_spec(config, transformer_layer_spec, False, vp_stage)
        return build_gpt(config, transformer_layer_spec, mtp_block_spec=block, vp_stage=vp_stage, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "parse", parse_more)
        patch.setattr(model, "build_config", build_changed)
        if of.latent:
            spec = partial(model.get_gpt_layer_local_spec, multi_latent_attention=True)
            patch.setattr(model, "TransformerConfig", MLATransformerConfig)
            patch.setattr(model, "get_gpt_layer_local_spec", spec)
        if of.predictions:
            patch.setattr(model, "GPTModel", build_predicting)
        yield
