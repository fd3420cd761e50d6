"""Slots of graphs, without a GPU and without ranks: how many, which one, and what leaves them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.zero_bubble import build
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Compute, Kind, Pass
from megatron.zero_bubble.core.plan.plan_of import plan_without_messages
from megatron.zero_bubble.integration.adapter.graph_slots import GraphSlots
from megatron.zero_bubble.integration.adapter.graphed_layers import GraphedLayer


class _Group:
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 4


def _slots(monkeypatch: pytest.MonkeyPatch, rank: int, num_microbatches: int) -> tuple[GraphSlots, tuple[int, ...]]:
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_group", lambda: _Group(rank))
    slots = GraphSlots(lambda ranks, count: build("zb-h1", num_ranks=ranks, num_microbatches=count))
    return slots, slots.capture(num_microbatches)


def _iteration(num_microbatches: int, forward_only: bool = False) -> Any:
    plan = plan_without_messages(build("zb-h1", num_ranks=4, num_microbatches=num_microbatches))
    return SimpleNamespace(prepared=SimpleNamespace(plan=plan, rank=0), forward_only=forward_only)


def test_slots_do_not_grow_with_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [_slots(monkeypatch, 0, count)[1] for count in (2, 4, 64)] == [(2,), (4,), (4,)]


def test_a_pass_has_the_slot_of_its_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    slots, _ = _slots(monkeypatch, 0, 8)
    found = []
    with slots.iteration(_iteration(8)):
        run = slots.replacing(_iteration(8), {Compute: lambda op, inputs: found.append(slots.current)})[Compute]
        for microbatch in range(8):
            run(Compute(Pass(0, Kind.F, microbatch)), ())
    assert found == [0, 1, 2, 3, 0, 1, 2, 3] and slots.current == 0


def test_more_microbatches_in_flight_than_graphs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    slots, _ = _slots(monkeypatch, 3, 2)  # also on a rank that itself needs no more
    for fewer in (_iteration(1), _iteration(2), _iteration(8, forward_only=True)):
        with slots.iteration(fewer):
            pass
    with pytest.raises(UserError, match="on rank 0, .* graphs for 2 microbatches, and this iteration needs 4"):
        slots.iteration(_iteration(8)).__enter__()
    with pytest.raises(UserError, match="captured for it; got different lengths"):
        slots.begin(SimpleNamespace(lengths=SimpleNamespace(differ=True)))  # type: ignore[arg-type]


class _Replay(torch.autograd.Function):
    """A graph, whose gradients are in memory that its next replay overwrites."""

    memory = torch.zeros(3)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _Replay.memory.copy_(grad * 2)
        return _Replay.memory.detach(), torch.zeros(3)


def test_gradients_that_leave_the_graphs_are_copied() -> None:
    """A message may still be under way, and a W still wait, when the next replay overwrites them."""
    module = torch.nn.Linear(3, 1, bias=False)
    weight = torch.nn.Parameter(torch.ones(3))
    slots: Any = SimpleNamespace(current=0)
    split: Any = None
    layers = [GraphedLayer(module, [lambda x: _Replay.apply(x, weight)], (), slots, split) for _ in range(2)]
    x = torch.ones(3, requires_grad=True)
    y = layers[1](layers[0](x))
    y.sum().backward()
    sent = x.grad
    assert sent is not None and sent.data_ptr() != _Replay.memory.data_ptr()
    _Replay.memory.fill_(torch.nan)
    assert torch.equal(sent, torch.full((3,), 4.0))
