"""Tests with the real TransformerEngine: schedules that delay weight gradients equal 1F1B bit for bit.

The flags select the attention backend whose backward is deterministic.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.zero_bubble.core.ir import Kind, Pass
from megatron.zero_bubble.engine.wgrad.fused import FusedAccumulator
from megatron.zero_bubble.engine.wgrad.store import WgradStore
from megatron.zero_bubble.engine.wgrad.transformer_engine import TransformerEngineSplit
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


def has_fused_queue() -> bool:
    """Whether the grouped linear of fused operations has a queue for weight gradients."""
    from transformer_engine.pytorch import ops

    grouped = getattr(ops, "GroupedLinear", None)
    return grouped is not None and "delay_wgrad_compute" in inspect.signature(grouped.__init__).parameters


class FusedExperts(torch.nn.Module):
    """A grouped linear whose weights a fused operation has, as megatron-core builds its experts."""

    def __init__(self) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        options = {"bias": False, "params_dtype": torch.bfloat16, "device": "cuda", "fuse_wgrad_accumulation": True}
        self.linear = te.GroupedLinear(2, 256, 128, **options)
        self.operation: Any = None

    def forward(self, x: torch.Tensor, splits: torch.Tensor) -> torch.Tensor:
        from transformer_engine.pytorch import ops

        if self.operation is None:
            linear, options = self.linear, {"bias": False, "dtype": torch.bfloat16, "device": "meta"}
            operation = ops.GroupedLinear(2, 256, 128, **options, accumulate_into_main_grad=True)
            for name, parameter in linear.named_parameters(recurse=False):
                operation.register_parameter(name, parameter)
            self.operation = (ops.Sequential(operation),)  # not a part of the module
        return self.operation[0](x, splits)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_gradients_of_fused_experts_have_the_same_bits_in_b_and_in_w(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_fused_queue():
        pytest.skip("TransformerEngine is older than 2.14")
    if recipe == "mxfp8" and torch.cuda.get_device_capability() < (10, 0):
        pytest.skip("this GPU has no MXFP8 arithmetic")
    in_b, in_w = gradients_of_experts(recipe, None, monkeypatch), gradients_of_experts(recipe, WgradStore, monkeypatch)
    assert in_b and all(torch.equal(one, other) and one.any() for one, other in zip(in_b, in_w, strict=True))


def gradients_of_experts(
    recipe: str, make_store: Callable[[Any], WgradStore] | None, monkeypatch: pytest.MonkeyPatch
) -> list[torch.Tensor]:
    """The gradients of three microbatches, whose W all come after the last B; in B without a store."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import MXFP8BlockScaling
    from transformer_engine.pytorch.module import _common

    from tests.helpers.engine import DataParallel

    torch.manual_seed(1)
    with monkeypatch.context() as patch:
        store = None
        if make_store is not None:
            store = make_store(FusedAccumulator())
            split = TransformerEngineSplit(store)
            queue, fused = _common.WeightGradStore, te.ops.GroupedLinear
            patch.setattr(te.GroupedLinear, "__init__", split.build(te.GroupedLinear.__init__))
            patch.setattr(fused, "__init__", split.build_operation(fused.__init__))
            patch.setattr(queue, "delay_wgrad_compute", split.delays(queue.delay_wgrad_compute))
            patch.setattr(queue, "put", split.put(queue.put))
            patch.setattr(DataParallel, "__init__", split.wrap(DataParallel.__init__))
        experts = FusedExperts()
        ddp = DataParallel(None, SimpleNamespace(delay_wgrad_compute=False), experts)
        for parameter in experts.parameters():
            parameter.main_grad = parameter.main_grad.cuda()  # type: ignore[attr-defined]
        options = {"fp8_recipe": MXFP8BlockScaling()} if recipe == "mxfp8" else {}
        for microbatch in range(3):
            x = torch.randn(256, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            with te.fp8_autocast(enabled=recipe == "mxfp8", **options):
                y = ddp.module(x, torch.tensor([128, 128], device="cuda"))
            if store is None:
                y.backward(y.detach().cos())
                continue
            with store.defer(Pass(0, Kind.B, microbatch)):
                y.backward(y.detach().cos())
        for microbatch in range(3) if store is not None else ():
            store.run(Pass(0, Kind.W, microbatch))
        assert store is None or not len(store)
        return [parameter.main_grad for parameter in experts.parameters()]  # type: ignore[attr-defined]
