"""Tests with the real TransformerEngine: schedules that delay weight gradients equal 1F1B bit for bit.

The flags select the attention backend whose backward is deterministic.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.gpu.test_training_on_gpus import needs_gpus, train

ENGINE = ("--transformer-impl", "transformer_engine", "--attention-backend", "unfused", "--bf16")
FP8 = "tests/gpu/pretrain_fp8.py"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    needs_gpus(2),
    pytest.mark.skipif(find_spec("transformer_engine") is None, reason="TransformerEngine is not installed"),
]


def needs_fp8(script: str) -> None:
    if script == FP8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8 arithmetic")


@pytest.mark.parametrize("script", ["scripts/pretrain_gpt.py", FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("options", [[], ["--disable-bias-linear", "--swiglu"]], ids=["bias", "no bias"])
def test_same_bits_as_stock(tmp_path: Path, script: str, options: list[str]) -> None:
    needs_fp8(script)
    reference = train(tmp_path, *ENGINE, *options, script=script)
    for schedule in ("1f1b", "zb-h1", "zb-h2"):
        assert train(tmp_path, *ENGINE, *options, "--zero-bubble-schedule", schedule, script=script) == reference


def test_slices_are_near_whole_sequences(tmp_path: Path) -> None:
    """The mask of a slice is aligned with the last of its keys, to which TransformerEngine adds those before it."""
    flags = (*ENGINE, "--zero-bubble-schedule")
    reference = train(tmp_path, *flags, "zb-h1")
    sliced = train(tmp_path, *flags, "seq-zb-h1", "--zero-bubble-num-slices", "2")
    assert [step[:2] for step in sliced] == [step[:2] for step in reference]
    for found, whole in zip(sliced, reference, strict=True):
        assert found[2] == pytest.approx(whole[2], rel=2e-2), "the tolerance of bfloat16 in the default mode"
