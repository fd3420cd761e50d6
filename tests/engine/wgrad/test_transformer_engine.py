"""Tests of split TransformerEngine linears on a fake engine: same bits, hooks and order as undelayed modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.zero_bubble.core.ir import Kind, Pass
from megatron.zero_bubble.engine.wgrad.fused import FusedAccumulator
from megatron.zero_bubble.engine.wgrad.store import WgradStore
from megatron.zero_bubble.engine.wgrad.transformer_engine import Conflicts, TransformerEngineSplit
from megatron.zero_bubble.integration.adapter.graph_slots import GraphSlots
from megatron.zero_bubble.integration.patching import transformer_engine
from megatron.zero_bubble.integration.patching.seam import Seam
from megatron.zero_bubble.planning.job.overlaps import OF_PASSES, OF_QUEUE, switched_off
from tests.helpers import engine
from tests.helpers.fused_operations import FusedGroupedLinear

IN, OUT, TOKENS = 6, 4, 5
LAST = 3
SPLIT_ORDER = "F0 F1 F2 F3 B0 B1 W0 B2 B3 W1 W2 W3"


class Experts(torch.nn.Module):
    """Two experts; in microbatch 1 the first one has no tokens."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.linear = engine.GroupedLinear(2, IN, OUT, **options)

    def forward(self, x: torch.Tensor, microbatch: int) -> torch.Tensor:
        return self.linear(x, [0, TOKENS] if microbatch == 1 else [2, TOKENS - 2], microbatch == 0)


class Layers(torch.nn.Module):
    """A recomputed norm with linear, an activation, and a linear whose bias is added outside."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = engine.LayerNormLinear(IN, IN, **options)
        self.second = engine.Linear(IN, OUT, return_bias=True, **options)

    def forward(self, x: torch.Tensor, microbatch: int) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        x = checkpoint(self.first, x, microbatch == 0, use_reentrant=True)
        y, bias = self.second(x.tanh(), microbatch == 0)
        return y if bias is None else y + bias


class Run:
    """A model with data parallelism, and its passes; undelayed if ``store`` is None."""

    def __init__(self, model: Callable[[], torch.nn.Module], fp8: bool, store: WgradStore | None) -> None:
        torch.manual_seed(1)
        self.store = store
        module = model()
        for one in module.modules():
            if hasattr(one, "fp8"):
                one.fp8 = fp8
        self.ddp = engine.DataParallel(None, SimpleNamespace(delay_wgrad_compute=False), module)
        self._generator = torch.Generator().manual_seed(2)
        self._outputs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.input_grads: dict[int, Any] = {}

    def passes(self, order: str) -> dict[str, torch.Tensor]:
        """Run passes such as ``F0 B0 W0``, with BW for a fused backward; return the gradients."""
        for word in order.split():
            self.run(Pass(0, Kind(word[:-1]), int(word[-1])))
        return {name: p.main_grad for name, p in self.ddp.module.named_parameters() if hasattr(p, "main_grad")}

    def run(self, work: Pass) -> None:
        split = work.kind is not Kind.BW
        store = self.store
        if work.kind is Kind.F:
            x = torch.randn(TOKENS, IN, generator=self._generator).requires_grad_()
            self._outputs[work.microbatch] = x, self.ddp.module(x, work.microbatch)
        elif work.kind is not Kind.W:
            x, y = self._outputs.pop(work.microbatch)
            self.ddp.is_last = work.microbatch == LAST
            with nullcontext() if store is None else store.defer(work, split):
                y.backward(y.detach().cos())
            self.input_grads[work.microbatch] = x.grad
        if store is not None and work.kind is Kind.W:
            store.run(work, lambda origin: origin.microbatch != LAST, self.ddp.no_sync)


@contextmanager
def split(say: Callable[[str], None] = print) -> Iterator[WgradStore]:
    """Install the split as ``patching`` does."""
    store = WgradStore(FusedAccumulator())
    own = TransformerEngineSplit(store, say=say, conflicts=Conflicts(OF_QUEUE, OF_PASSES, switched_off))
    with ExitStack() as stack:
        stack.enter_context(engine.installed())
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for linear in (engine.Linear, engine.LayerNormLinear, engine.GroupedLinear):
            patch.setattr(linear, "__init__", own.build(linear.__init__))
        operation = FusedGroupedLinear
        patch.setattr(operation, "__init__", own.build_operation(operation.__init__))
        delays = own.delays(engine.WeightGradStore.delay_wgrad_compute)
        patch.setattr(engine.WeightGradStore, "delay_wgrad_compute", delays)
        patch.setattr(engine.WeightGradStore, "put", own.put(engine.WeightGradStore.put))
        patch.setattr(engine.DataParallel, "__init__", own.wrap(engine.DataParallel.__init__))
        yield store


def stock(model: Callable[[], torch.nn.Module], order: str, fp8: bool = False) -> Run:
    run = Run(model, fp8, None)
    run.passes(" ".join(word.replace("BW", "B") for word in order.split() if word[0] != "W"))
    return run


def gradients(run: Run) -> dict[str, torch.Tensor]:
    return run.passes("")


def assert_same_bits(own: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert own.keys() == expected.keys()
    different = [name for name, grad in own.items() if not torch.equal(grad, expected[name])]
    assert not different, different
    assert all(bool(grad.any()) for grad in expected.values()), "the reference must have no zero gradient"


@pytest.mark.parametrize("model", [Layers, Experts])
@pytest.mark.parametrize("fused", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("fp8", [False, True], ids=["fp32", "fp8"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(
    "order",
    [
        SPLIT_ORDER,
        "F0 B0 W0 F1 B1 W1 F2 B2 W2 F3 B3 W3",
        "F0 F1 BW0 F2 BW1 F3 BW2 BW3",
        "F0 F1 BW0 F2 B1 F3 W1 BW2 B3 W3",
    ],
    ids=["split", "one by one", "fused", "mixed"],
)
def test_split_modules_equal_undelayed_modules_in_bits_and_hooks(
    model: type[torch.nn.Module], fused: bool, fp8: bool, bias: bool, order: str
) -> None:
    def make() -> torch.nn.Module:
        return model(fuse_wgrad_accumulation=fused, bias=bias)

    expected = stock(make, order, fp8)
    with split() as store:
        own = Run(make, fp8, store)
        assert_same_bits(own.passes(order), gradients(expected))
    assert all(torch.equal(grad, expected.input_grads[i]) for i, grad in own.input_grads.items())
    assert sorted(own.ddp.ready) == sorted(expected.ddp.ready), "each must be ready once, in the last microbatch"
    assert all(parameter.grad is None for parameter in own.ddp.parameters())
    assert not len(store)


class _Nodes(Layers):
    """The same layers as two nodes."""

    def forward(self, x: torch.Tensor, microbatch: int) -> torch.Tensor:
        before = self.first(x, microbatch == 0)
        boundary = before.detach().requires_grad_()
        y, bias = self.second(boundary.tanh(), microbatch == 0)
        self.boundary = before, boundary
        return y if bias is None else y + bias


class _ByNodes(Run):
    """A fused backward runs node by node, each followed by its weight gradients."""

    def run(self, work: Pass) -> None:
        if work.kind is Kind.F:
            super().run(work)
            return
        assert self.store is not None
        x, y = self._outputs.pop(work.microbatch)
        before, boundary = self.ddp.module.boundary
        self.ddp.is_last = work.microbatch == LAST
        with self.store.defer(work):
            for output, grad in ((y, lambda: y.detach().cos()), (before, lambda: boundary.grad)):
                output.backward(grad())
                self.store.settle()
                w = work._replace(kind=Kind.W)
                self.store.run(w, lambda origin: origin.microbatch != LAST, self.ddp.no_sync)
        self.input_grads[work.microbatch] = x.grad


@pytest.mark.parametrize("fused", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("fp8", [False, True], ids=["fp32", "fp8"])
def test_weight_gradients_may_run_within_their_backward(fused: bool, fp8: bool) -> None:
    def make() -> torch.nn.Module:
        return _Nodes(fuse_wgrad_accumulation=fused)

    order = "F0 BW0 F1 BW1 F2 BW2 F3 BW3"
    expected = stock(lambda: Layers(fuse_wgrad_accumulation=fused), order, fp8)
    with split() as store:
        own = _ByNodes(make, fp8, store)
        assert_same_bits(own.passes(order), gradients(expected))
    assert sorted(own.ddp.ready) == sorted(expected.ddp.ready), "each must be ready once, in the last microbatch"
    assert not len(store)


def test_weight_gradients_are_grouped_by_weight() -> None:
    make = Layers
    expected = stock(make, SPLIT_ORDER)
    with split() as store:
        own = Run(make, False, store)
        own.passes("F0 F1 F2 F3 B0 B1 B2 B3")
        works = [Pass(0, Kind.W, microbatch) for microbatch in range(LAST + 1)]
        store.group(works)
        for work in works:
            own.run(work)
        assert_same_bits(gradients(own), gradients(expected))
    second, first = sorted(own.ddp.ready[-4:])[2:], sorted(own.ddp.ready[-4:])[:2]
    assert [name.split(".")[0] for name in (*first, *second)] == ["first"] * 2 + ["second"] * 2


def test_deferred_tensors_and_elements_are_counted() -> None:
    with split() as store:
        own = Run(lambda: Experts(fuse_wgrad_accumulation=True), False, store)
        own.passes("F0 B0")
        kept = sum(t.numel() for t in store.tensors(Pass(0, Kind.W, 0)))
        assert kept == TOKENS * (IN + OUT), "only input and output gradient count; main_grad exists anyway"
        assert all(p.grad is None for p in own.ddp.parameters()), "no placeholder gradients as large as the weights"
        (entry,) = store._stored[Pass(0, Kind.W, 0)]
        assert entry.deferred.num_elements == 2 * IN * OUT
        del entry
        own.passes("W0 F1 BW1")
        assert not len(store), "a fused backward must defer nothing"


@pytest.mark.parametrize("model", [Layers, Experts])
def test_quantized_output_gradient_keeps_only_the_half_that_w_needs(model: type[torch.nn.Module]) -> None:
    with split() as store:
        own = Run(lambda: model(bias=False, fuse_wgrad_accumulation=True), True, store)
        own.passes("F0 B0")
        kept = sum(t.numel() for t in store.tensors(Pass(0, Kind.W, 0)))
        sizes = [IN + OUT] if model is Experts else [IN + IN, IN + OUT]
        assert kept == TOKENS * sum(sizes), "inputs, which the fake does not divide, and halves of output gradients"
        own.passes("W0")


@pytest.mark.parametrize(
    "model", [Layers, Experts]
)  # only with fp8 does TransformerEngine compute gradients of these biases
def test_frozen_weights_defer_nothing_and_their_biases_do_not_wait(model: type[torch.nn.Module]) -> None:
    def make() -> torch.nn.Module:
        module = model()
        for name, parameter in module.named_parameters():
            parameter.requires_grad_("linear.weight" not in name and "second.weight" not in name)
        return module

    expected = stock(make, SPLIT_ORDER, fp8=True)
    with split() as store:
        own = Run(make, True, store)
        assert_same_bits(own.passes(SPLIT_ORDER), gradients(expected))
    assert sorted(own.ddp.ready) == sorted(expected.ddp.ready)


@pytest.mark.parametrize("fp8", [False, True])
def test_frozen_bias_gets_no_gradient(fp8: bool) -> None:
    def make() -> torch.nn.Module:
        module = Layers()
        for linear in (module.first, module.second):
            linear.bias.requires_grad_(False)
        return module

    expected = stock(make, SPLIT_ORDER, fp8)
    with split() as store:
        own = Run(make, fp8, store)
        assert_same_bits(own.passes(SPLIT_ORDER), gradients(expected))
        assert own.ddp.module.second.bias.grad is None  # type: ignore[union-attr]


def test_module_used_twice_in_a_microbatch() -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = engine.Linear(IN, IN)

        def forward(self, x: torch.Tensor, microbatch: int) -> torch.Tensor:
            return self.linear(self.linear(x).tanh())

    for fp8 in (False, True):
        expected = gradients(stock(Twice, SPLIT_ORDER, fp8))
        with split() as store:
            own = Run(Twice, fp8, store).passes(SPLIT_ORDER)
        for name, grad in own.items():  # autograd sums both uses before calling the hook
            torch.testing.assert_close(grad, expected[name])


def test_evaluation_defers_nothing() -> None:
    with split() as store:
        own = Run(Layers, False, store)
        with torch.no_grad():
            own.passes("F0 F1")
        assert not len(store) and own.ddp.module.second.wgrad_store.context.empty()  # type: ignore[union-attr]


def test_forwards_keep_the_gradients_of_the_last_step() -> None:
    """With post-validation, parameters keep their gradients until the step is validated."""
    with split() as store:
        module: Any = Run(Layers, False, store).ddp.module
        module.second.bias.grad = torch.ones(OUT)
        with store.defer(Pass(0, Kind.F, 0)):
            module(torch.ones(2, IN, requires_grad=True), 0)
        assert module.second.bias.grad is not None


@pytest.mark.parametrize("fused", [False, True])
def test_restarted_iteration_has_no_leftover_gradients(fused: bool) -> None:
    """A backward fails; nothing of it reaches the gradients, which the optimizer has zeroed."""

    def make() -> torch.nn.Module:
        return Layers(fuse_wgrad_accumulation=fused)

    def broken_backward(run: Run) -> None:
        with store.defer(Pass(0, Kind.B, 2)):
            run._outputs[2][1].sum().backward()
            raise RuntimeError("broken")

    expected = stock(make, SPLIT_ORDER, fp8=True)
    with split() as store:
        own = Run(make, True, store)
        own.passes("F0 F1 F2 B0 B1 W0")
        with pytest.raises(RuntimeError, match="broken"):
            broken_backward(own)
        store.clear()
        assert not len(store)
        for parameter in own.ddp.parameters():
            parameter.main_grad.zero_()
            parameter.grad, parameter.grad_added_to_main_grad = None, False  # type: ignore[attr-defined]
        own._generator.manual_seed(2)
        assert_same_bits(own.passes(SPLIT_ORDER), gradients(expected))


@pytest.mark.parametrize("version, halves", [("2.8.0", 2), ("2.10.1", 2), ("2.11.0", 1), ("2.20.0", 1)])
@pytest.mark.parametrize("model", [Layers, Experts])
def test_nvfp4_keeps_the_scale_of_output_gradients(model: Any, version: str, halves: int) -> None:
    """Until 2.11, a product finds it in the rows only, which are kept then; it multiplies the columns."""

    def make() -> torch.nn.Module:
        return model(bias=False)

    with engine.installed(version):
        expected = Run(make, False, None)
        of_stock = passes(expected, "F0 B0 F1 B1")
    store = WgradStore(FusedAccumulator())
    with engine.installed(version), pytest.MonkeyPatch.context() as patch:
        graphed = Seam("megatron.core.transformer.cuda_graphs", "make_graphed_callables", (), "is not there")
        for seam, replace in transformer_engine.split(store, lambda _: None, graphed, GraphSlots()).replacements:
            if seam is transformer_engine.DATA_PARALLEL:
                patch.setattr(engine.DataParallel, "__init__", replace(engine.DataParallel.__init__))
            else:
                holder, original = seam.resolve()
                patch.setattr(holder, seam.attribute, replace(original))
        own = Run(make, False, store)
        passes(own, "F0 B0 F1 B1")
        (entry, *_) = store._stored[Pass(0, Kind.W, 0)]
        grads_of_output: Any = entry.deferred._operands[1]  # type: ignore[attr-defined]
        grad = grads_of_output if model is Layers else grads_of_output[0]
        assert sum(half is not None for half in grad.get_data_tensors()) == halves
        del entry, grad, grads_of_output
        grads = passes(own, "W0 W1")
    assert all(torch.equal(grads[name], of_stock[name]) for name in of_stock)


def passes(run: Run, order: str) -> dict[str, torch.Tensor]:
    for module in run.ddp.module.modules():
        if hasattr(module, "fp8"):
            module.fp8 = "nvfp4"
    return run.passes(order)
