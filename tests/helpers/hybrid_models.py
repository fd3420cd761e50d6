"""Train models with recurrent layers in our own loop, with slow stand-ins for the kernels of ``mamba_ssm`` and ``fla``.

The functions of ``parity`` and ``slices`` then train them, in place of a GPT with attention.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers import slices, vocabulary
from tests.helpers.parity import Outcome, train
from tests.helpers.slices import Difference

STAND_INS = Path(__file__).with_name("hybrid")
_MAMBA = {"mamba_state_dim": 4, "mamba_head_dim": 8, "mamba_num_groups": 2}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
}
_MIXER, _KERNEL = "megatron.core.ssm.mamba_mixer", "mamba_split_conv1d_scan_combined"
DELTA = "delta nets"
"""In place of a pattern: a GPT of which every other layer is a gated delta net, from the first on."""


@contextmanager
def recurrent(pattern: str) -> Iterator[None]:
    """Context in which our training loop builds a hybrid model with the layers of ``pattern``, or ``DELTA``."""
    from pretrain import model

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STAND_INS)
        if not hasattr(sys.modules.get(_MIXER, SimpleNamespace(**{_KERNEL: None})), _KERNEL):
            for name in [name for name in sys.modules if name.startswith("megatron.core.ssm")]:
                del sys.modules[name]  # an earlier test has imported them without the stand-ins
        build = partial(_build_delta, model.GPTModel) if pattern == DELTA else partial(_build_hybrid, pattern)
        patch.setattr(model, "GPTModel", build)
        yield


def _build_hybrid(pattern: str, config: Any, transformer_layer_spec: Any, vp_stage: int | None, **more: Any) -> Any:
    _set(config, _MAMBA)
    stack = importlib.import_module("hybrid_layers").stack
    mamba = importlib.import_module("megatron.core.models.mamba")
    return mamba.MambaModel(config, stack, hybrid_override_pattern=pattern, **more)


def _build_delta(build: Any, config: Any, transformer_layer_spec: Any, vp_stage: int | None, **more: Any) -> Any:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    _set(config, _DELTA)
    own = importlib.import_module("delta_layers").gated_delta_net
    specs = getattr(transformer_layer_spec, "layer_specs", None)
    if specs is None:
        specs = [transformer_layer_spec] * get_num_layers_to_build(config, vp_stage=vp_stage)
    specs = [
        replace(spec, submodules=replace(spec.submodules, self_attention=own)) if number % 2 == 0 else spec
        for number, spec in enumerate(specs, get_transformer_layer_offset(config, vp_stage))
    ]
    block = TransformerBlockSubmodules(layer_specs=specs, layer_norm=WrappedTorchNorm)
    return build(config, block, vp_stage=vp_stage, **more)


def _set(config: Any, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        setattr(config, name, size)


def train_recurrent(rank: int, pattern: str, flags: str, schedules: Sequence[str | None]) -> list[Outcome]:
    """Train such a model; call it on a rank pool."""
    with recurrent(pattern):
        return train(rank, flags, schedules)


def recurrent_differences(rank: int, pattern: str, flags: str, schedules: Sequence[str]) -> list[Difference]:
    """As ``differences``, for such a model; call it on a rank pool."""
    with recurrent(pattern):
        return slices.differences(rank, flags, schedules)


def differences_of_hybrid(rank: int, pattern: str, flags: str, schedules: Sequence[str]) -> list[Difference]:
    """Return how far the gradients of each schedule with a divided vocabulary are from those of stock."""
    with recurrent(pattern):
        return vocabulary.differences(rank, flags, schedules)
