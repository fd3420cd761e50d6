"""Tests with the real TransformerEngine: schedules that delay weight gradients equal 1F1B bit for bit.

The flags select the attention backend whose backward is deterministic.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.gpu.test_training_on_gpus import train

ENGINE = ("--transformer-impl", "transformer_engine", "--attention-backend", "unfused", "--bf16")
FP8 = "tests/gpu/pretrain_fp8.py"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU that torch can use"),
    pytest.mark.skipif(find_spec("transformer_engine") is None, reason="TransformerEngine is not installed"),
]


def needs_fp8(script: str) -> None:
    if script == FP8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8 arithmetic")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs one GPU per rank")
@pytest.mark.parametrize("script", ["scripts/pretrain_gpt.py", FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("options", [[], ["--disable-bias-linear", "--swiglu"]], ids=["bias", "no bias"])
def test_same_bits_as_stock(tmp_path: Path, script: str, options: list[str]) -> None:
    needs_fp8(script)
    reference = train(tmp_path, *ENGINE, *options, script=script)
    for schedule in ("1f1b", "zb-h1", "zb-h2"):
        assert train(tmp_path, *ENGINE, *options, "--zero-bubble-schedule", schedule, script=script) == reference


@pytest.mark.parametrize("script", ["scripts/pretrain_gpt.py", FP8], ids=["bf16", "fp8"])
def test_two_ranks_on_one_gpu_over_gloo_equal_1f1b(tmp_path: Path, script: str) -> None:
    """The reference is our own 1F1B with fused backwards, because stock megatron-core cannot share a GPU over gloo."""
    needs_fp8(script)
    shared = (*ENGINE, "--distributed-backend", "gloo")
    reference = train(tmp_path, *shared, "--zero-bubble-schedule", "1f1b", script=script)
    assert train(tmp_path, *shared, "--zero-bubble-schedule", "zb-h1", script=script) == reference


def test_slices_over_gloo_are_near_whole_sequences(tmp_path: Path) -> None:
    """The mask of a slice is aligned with the last of its keys, to which TransformerEngine adds those before it."""
    shared = (*ENGINE, "--distributed-backend", "gloo", "--zero-bubble-schedule")
    reference = train(tmp_path, *shared, "zb-h1")
    sliced = train(tmp_path, *shared, "seq-zb-h1", "--zero-bubble-num-slices", "2")
    assert [step[:2] for step in sliced] == [step[:2] for step in reference]
    for found, whole in zip(sliced, reference, strict=True):
        assert found[2] == pytest.approx(whole[2], rel=2e-2), "the tolerance of bfloat16 in the default mode"
