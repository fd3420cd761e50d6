"""Every clause of ``wgrad.contract`` on every kind of linear that defers its weight gradient, exact and fused.

A model trains three microbatches twice: with stock autograd, and split. What someone does to it from outside (hooks,
gradients within the forward, branches that write in place) must have the same effect.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Kind, Pass
from megatron.zero_bubble.engine.wgrad.accumulate import GradAccumulator
from megatron.zero_bubble.engine.wgrad.asked import answering
from megatron.zero_bubble.engine.wgrad.contract import CLAUSES
from megatron.zero_bubble.engine.wgrad.fused import FusedAccumulator
from megatron.zero_bubble.engine.wgrad.linear import split_linear
from megatron.zero_bubble.engine.wgrad.store import WgradStore
from megatron.zero_bubble.engine.wgrad.transformer_engine import TransformerEngineSplit
from tests.helpers import engine
from tests.helpers.fused_operations import FusedGroupedLinear
from tests.helpers.split_linears import (
    IN,
    OUT,
    STOCK,
    TOKENS,
    CoreLinears,
    EngineExperts,
    EngineFusedExperts,
    EngineLinears,
)

ORDER = "F0 F1 B0 F2 B1 W0 B2 W1 W2"

Inside = Callable[["Setup", torch.Tensor, torch.Tensor], Any]
"""Called in every forward with the hidden states and the output; returns what is added to the loss."""


CORE = {"core, exact": GradAccumulator, "core, fused": FusedAccumulator}
ENGINE: dict[str, Callable[[], torch.nn.Module]] = {
    "engine": EngineLinears,
    "engine, main_grad": lambda: EngineLinears(fuse_wgrad_accumulation=True),
    "experts of the engine": EngineExperts,
    "experts of the engine, main_grad": lambda: EngineExperts(fuse_wgrad_accumulation=True),
    "operations of the engine": EngineFusedExperts,
    "operations of the engine, main_grad, in one piece": lambda: EngineFusedExperts(
        fuse_wgrad_accumulation=True, is_grouped=True
    ),
}
KINDS = [*CORE, *ENGINE]


class Setup:
    """A model and its passes; ``store`` is None for stock."""

    def __init__(self, kind: str, store: WgradStore | None) -> None:
        torch.manual_seed(1)
        self.store = store
        self.model: Any = CoreLinears() if kind in CORE else ENGINE[kind]()
        self.parameters = dict(self.model.named_parameters())
        self.ddp = None
        if kind in ENGINE:
            self.ddp = engine.DataParallel(None, SimpleNamespace(delay_wgrad_compute=False), self.model)
        if store is not None:
            store._accumulator.watch([self.model])  # type: ignore[attr-defined]
            store.watch([self.model])
        self._losses: dict[int, torch.Tensor] = {}
        self._generator = torch.Generator().manual_seed(2)

    def train(self, inside: Inside = lambda *_: 0.0, order: str = ORDER) -> dict[str, torch.Tensor]:
        """Run the passes; returns the gradients."""
        for word in order.split():
            self.run(Pass(0, Kind(word[0]), int(word[1])), inside)
        return self.gradients()

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients so far."""
        grads = {name: p.grad if self.ddp is None else p.main_grad for name, p in self.parameters.items()}
        return {name: grad.clone() for name, grad in grads.items() if grad is not None}

    def run(self, work: Pass, inside: Inside = lambda *_: 0.0) -> None:
        store = self.store
        if work.kind is Kind.W:
            if store is not None:
                store.run(work)
            return
        with nullcontext() if store is None else store.defer(work):
            if work.kind is Kind.B:
                self._losses.pop(work.microbatch).backward()
                return
            x = torch.randn(TOKENS, IN, generator=self._generator).requires_grad_()
            h = self.model.hidden(x, work.microbatch)
            y = self.model.output(h, work.microbatch)
            self._losses[work.microbatch] = y.cos().sum() + inside(self, h, y)


@contextmanager
def split(kind: str) -> Iterator[WgradStore]:
    """Install the split of a kind of linear, as ``patching`` does."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        accumulator = CORE.get(kind, GradAccumulator)()
        store = WgradStore(accumulator)
        patch.setattr(torch.autograd, "grad", answering(torch.autograd.grad, store))
        if kind in CORE:
            patch.setattr(CoreLinears, "linear", staticmethod(split_linear(STOCK, store, accumulator)))
        else:
            own = TransformerEngineSplit(store)
            stack.enter_context(engine.installed())
            for linear in (engine.Linear, engine.LayerNormLinear, engine.GroupedLinear):
                patch.setattr(linear, "__init__", own.build(linear.__init__))
            patch.setattr(FusedGroupedLinear, "__init__", own.build_operation(FusedGroupedLinear.__init__))
            for name, replaced in {"put": own.put, "delay_wgrad_compute": own.delays}.items():
                patch.setattr(engine.WeightGradStore, name, replaced(getattr(engine.WeightGradStore, name)))
            patch.setattr(engine.DataParallel, "__init__", own.wrap(engine.DataParallel.__init__))
        yield store


def assert_as_stock(
    kind: str, inside: Inside = lambda *_: 0.0, prepare: Callable[[Setup], Any] = lambda _: None
) -> dict[str, torch.Tensor]:
    """Train stock and split; compare the gradients and what ``prepare`` returns. Returns the gradients."""
    with engine.installed():
        stock = Setup(kind, None)
        expected_notes, expected = prepare(stock), stock.train(inside)
    with split(kind) as store:
        own = Setup(kind, store)
        notes, grads = prepare(own), own.train(inside)
        assert not len(store)
    assert notes == expected_notes
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        if "fused" in kind:
            torch.testing.assert_close(grad, expected[name], msg=name)
        else:
            assert torch.equal(grad, expected[name]), name
    return expected


def hooked(setup: Setup) -> Counter[str]:
    """Halve every gradient, and count all kinds of hooks."""
    calls: Counter[str] = Counter()
    for name, parameter in setup.parameters.items():

        def halve(grad: torch.Tensor, name: str = name) -> torch.Tensor:
            calls[f"before {name}"] += 1
            return grad / 2

        def after(_: Any, name: str = name) -> None:
            calls[f"after {name}"] += 1

        def of_node(*_: Any, name: str = name) -> None:
            calls[f"node {name}"] += 1

        parameter.register_hook(halve)
        parameter.register_post_accumulate_grad_hook(after)
        setup.model._nodes = [
            *getattr(setup.model, "_nodes", ()),
            torch.autograd.graph.get_gradient_edge(parameter).node,
        ]
        setup.model._nodes[-1].register_hook(of_node)
    return calls


def hooks(kind: str) -> None:
    plain = assert_as_stock(kind)
    halved = assert_as_stock(kind, prepare=hooked)
    if "main_grad" not in kind:  # with TransformerEngine's fused accumulation, stock's hooks do not see the gradient
        assert all(torch.equal(halved[name], plain[name] / 2) for name in plain)


def names(kind: str) -> None:
    noted: list[dict[str, Any]] = []

    def weighted(setup: Setup, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        noted.append({})
        for name, parameter in setup.parameters.items():
            (grad,) = torch.autograd.grad(y.sin().sum(), parameter, retain_graph=True)
            noted[-1][name] = grad
        return y.sin().sum() * sum(grad.norm() for grad in noted[-1].values()).clamp(max=2)  # type: ignore[union-attr]

    if "main_grad" in kind:
        pytest.skip("with fused accumulation, stock itself adds such gradients to main_grad")
    assert_as_stock(kind, weighted)
    assert_noted_as_stock(noted, rtol=0, atol=0)
    if kind in CORE:
        noted.clear()
        assert_as_stock(kind, functools.partial(weighted_by_all, noted), prepare=masked)
        assert_noted_as_stock(noted)  # added up in another order


def assert_noted_as_stock(noted: list[dict[str, Any]], **tolerance: float) -> None:
    half = len(noted) // 2
    for stock, own in zip(noted[:half], noted[half:], strict=True):
        for name, grad in stock.items():
            torch.testing.assert_close(own[name], grad, msg=name, **tolerance)


def masked(setup: Setup) -> None:
    """A hook that returns another gradient."""
    setup.parameters["first"].register_hook(lambda grad: grad * 0.25)


def weighted_by_all(noted: list[dict[str, Any]], setup: Setup, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The norms of gradients by weights that the loss also uses directly, and through a gradient of an activation."""
    (penalty,) = torch.autograd.grad(y.sin().sum(), h, create_graph=True)
    part = y.sin().sum() + penalty.square().sum() + sum(each.square().sum() for each in setup.parameters.values())
    grads = torch.autograd.grad(part, list(setup.parameters.values()), retain_graph=True)
    noted.append(dict(zip(setup.parameters, grads, strict=True)))
    return y.square().sum() * sum(grad.norm() for grad in grads).clamp(max=2)  # type: ignore[union-attr]


def demand(kind: str) -> None:
    def weighted(setup: Setup, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        parts = y.sum(), y.square().sum()
        first, second = (torch.autograd.grad(part, h, retain_graph=True)[0].norm() for part in parts)
        return parts[1] * (first / second).detach()

    if "main_grad" in kind:
        pytest.skip("with fused accumulation, stock itself adds such gradients to main_grad")
    assert_as_stock(kind, weighted)


def place(kind: str) -> None:
    def part(setup: Setup, h: torch.Tensor, y: torch.Tensor) -> float:
        y.sum().backward(retain_graph=True)
        return 0.0

    with split(kind) as store, pytest.raises(UserError, match=r"only the schedule's own backward .* second.* got one"):
        Setup(kind, store).train(part)


def derivatives(kind: str) -> None:
    def penalty(setup: Setup, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        (grad,) = torch.autograd.grad(y.sin().sum(), h, create_graph=True)
        return grad.square().sum()

    if kind in ENGINE:
        pytest.skip("TransformerEngine's linears cannot be differentiated twice")
    assert_as_stock(kind, penalty)


def saving(kind: str) -> None:
    calls: Counter[tuple[str, Any]] = Counter()

    def count(what: str) -> Callable[[Any], Any]:
        def hook(tensor: torch.Tensor) -> torch.Tensor:
            calls[what, isinstance(tensor, torch.nn.Parameter), tensor.shape] += 1
            return tensor

        return hook

    counts = []
    with engine.installed():
        with torch.autograd.graph.saved_tensors_hooks(count("pack"), count("unpack")):
            Setup(kind, None).train()
        counts.append(calls.copy())
    calls.clear()
    with split(kind) as store, torch.autograd.graph.saved_tensors_hooks(count("pack"), count("unpack")):
        Setup(kind, store).train()
    assert calls == counts[0]
    for reentrant in (False, True):
        assert_checkpoint_frees(kind, reentrant)


def assert_checkpoint_frees(kind: str, reentrant: bool) -> None:
    """The inputs of linears that are computed again are free between F and B, and the gradients those of stock."""
    alive: list[weakref.ref[torch.Tensor]] = []

    def recomputed(setup: Setup) -> None:
        model = setup.model

        def output(h: torch.Tensor, microbatch: int, output: Any = model.output) -> torch.Tensor:
            def run(h: torch.Tensor) -> torch.Tensor:
                inner = h.exp()
                alive.append(weakref.ref(inner))
                return output(inner, microbatch)

            alive.clear()
            y = checkpoint(run, h, use_reentrant=reentrant)
            assert [each() for each in alive] == [None]
            return y

        model.output = output

    assert_as_stock(kind, prepare=recomputed)


class _Scale(torch.autograd.Function):
    """Its backward writes to the gradient that it gets."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.mul_(0.5)


def branched(setup: Setup, without_version: bool = False) -> None:
    """Add a branch next to both linears, whose backward comes after theirs."""
    model = setup.model
    scale = _Unnoticed if without_version else _Scale

    def alongside(linear: Callable[..., torch.Tensor], width: int) -> Callable[..., torch.Tensor]:
        own = torch.ones(width).requires_grad_()

        def run(x: torch.Tensor, microbatch: int) -> torch.Tensor:
            side = scale.apply(own.expand(TOKENS, width) * 2)
            return linear(x, microbatch) + side

        return run

    model.hidden, model.output = alongside(model.hidden, IN), alongside(model.output, OUT)


class _Unnoticed(torch.autograd.Function):
    """As a collective or a kernel of one's own, it writes without raising the version."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        torch.from_dlpack(grad).mul_(0.5)
        return grad


def versions(kind: str) -> None:
    for without_version in (False, True):
        assert_as_stock(kind, prepare=lambda setup, flag=without_version: branched(setup, flag))
    with split(kind) as store:
        own = Setup(kind, store)
        own.train(order="F0 B0")
        with torch.no_grad():
            next(iter(store.tensors(Pass(0, Kind.W, 0)))).add_(1)
        with pytest.raises(UserError, match=r"changed those of .* in place after its backward"):
            own.train(order="W0")


def lifetimes(kind: str) -> None:
    gc.disable()
    try:
        with split(kind) as store:
            own = Setup(kind, store)
            kept: list[torch.Tensor] = []
            own.train(lambda setup, h, y: kept.append(y.relu()) or 0.0, order="F0 B0")  # type: ignore[func-returns-value]
            operands = [weakref.ref(tensor) for tensor in store.tensors(Pass(0, Kind.W, 0))]
            assert len(operands) >= 4
            own.train(order="W0")
            assert not [operand for operand in operands if operand() is not None]
            assert kept[0].grad_fn is not None, "the report keeps its graph"
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "clause",
    [hooks, names, demand, place, derivatives, saving, versions, lifetimes],
    ids=lambda clause: clause.__name__,
)
def test_w_keeps_the_clause(clause: Callable[[str], None], kind: str) -> None:
    clause(kind)


def test_every_clause_is_tested() -> None:
    (mark,) = (m for m in test_w_keeps_the_clause.pytestmark if m.args[0] == "clause")  # type: ignore[attr-defined]
    assert [clause.name for clause in CLAUSES] == [clause.__name__ for clause in mark.args[1]]
