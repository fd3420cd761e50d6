"""Train hybrid models in our own loop, with slow stand-ins for the kernels of ``mamba_ssm``; see ``parity``."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.parity import Outcome, train
from tests.helpers.slices import Difference
from tests.helpers.vocabulary import differences

STAND_INS = Path(__file__).with_name("hybrid")
_SIZES = {"mamba_state_dim": 4, "mamba_head_dim": 8, "mamba_num_groups": 2}


@contextmanager
def _in_place_of_a_gpt(pattern: str) -> Iterator[None]:
    """Context in which a model with the layers of ``pattern`` is built in place of a GPT."""
    from pretrain import model

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STAND_INS)
        stack = importlib.import_module("hybrid_layers").stack
        mamba = importlib.import_module("megatron.core.models.mamba")

        def build(config: Any, transformer_layer_spec: Any, vp_stage: int | None, **more: Any) -> Any:
            for name, size in _SIZES.items():
                setattr(config, name, size)
            return mamba.MambaModel(config, stack, hybrid_override_pattern=pattern, **more)

        patch.setattr(model, "GPTModel", build)
        yield


def train_hybrid(rank: int, pattern: str, flags: str, schedules: Sequence[str | None]) -> list[Outcome]:
    """Train a model with the layers of ``pattern``; call it on a rank pool."""
    with _in_place_of_a_gpt(pattern):
        return train(rank, flags, schedules)


def differences_of_hybrid(rank: int, pattern: str, flags: str, schedules: Sequence[str]) -> list[Difference]:
    """Return how far the gradients of each schedule with a divided vocabulary are from those of stock."""
    with _in_place_of_a_gpt(pattern):
        return differences(rank, flags, schedules)
