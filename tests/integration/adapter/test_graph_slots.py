"""Slots of graphs, without a GPU and without ranks: how many, which one, and what leaves them."""

from __future__ import annotations

import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.zero_bubble import build
from megatron.zero_bubble.core.errors import PeerError, UserError
from megatron.zero_bubble.core.ir import Compute, Kind, Pass
from megatron.zero_bubble.core.plan import slots
from megatron.zero_bubble.core.plan.plan_of import plan_without_messages
from megatron.zero_bubble.engine.runtime.watchdog import Watchdog
from megatron.zero_bubble.integration.adapter.graph_slots import GraphSlots
from megatron.zero_bubble.integration.adapter.graphed_layers import GraphedLayer


class _Layers:
    """The layers of a stage, with a list of the captures."""

    def __init__(self, chunk: torch.nn.Module) -> None:
        self._chunk = chunk
        self.captures: list[int] = []

    @property
    def num_slots(self) -> int:
        return max(self.captures)

    def is_in(self, chunk: torch.nn.Module) -> bool:
        return chunk is self._chunk

    def capture(self, num_slots: int) -> None:
        self.captures.append(num_slots)


def _iteration(schedule: str, num_microbatches: int, forward_only: bool = False) -> Any:
    plan = plan_without_messages(build(schedule, num_ranks=4, num_microbatches=num_microbatches))
    return SimpleNamespace(prepared=SimpleNamespace(slots=slots(plan, 0)), forward_only=forward_only)


def _parts(*chunks: torch.nn.Module) -> Any:
    return [SimpleNamespace(facts=SimpleNamespace(stage=4 * i), model=chunk) for i, chunk in enumerate(chunks)]


def test_graphs_are_captured_when_an_iteration_needs_them() -> None:
    """One at first, and never again for fewer microbatches in flight, nor for evaluations."""
    chunks = torch.nn.Module(), torch.nn.Module()
    layers = [_Layers(chunk) for chunk in chunks]
    of_slots = GraphSlots()
    for each in layers:
        of_slots.add(each)
    for iteration in (_iteration("zb-h1", 2), _iteration("zb-h1", 64), _iteration("zb-h1", 3)):
        of_slots.stages(iteration, _parts(chunks[0]))
    assert [each.captures for each in layers] == [[1, 2, 4], [1]]
    of_slots.stages(_iteration("zb-interleaved", 64, forward_only=True), _parts(*chunks))
    assert [each.captures for each in layers] == [[1, 2, 4], [1]]
    of_slots.stages(_iteration("zb-interleaved", 64), _parts(*chunks))
    assert [each.captures for each in layers] == [[1, 2, 4, 8], [1, 4]]
    of_slots.remove(layers[0])
    of_slots.stages(_iteration("zb-h2", 64), _parts(chunks[0]))
    assert layers[0].captures == [1, 2, 4, 8]


def test_no_mark_is_queried_during_a_capture() -> None:
    """A query in another thread ends a capture, and marks of the iteration before may be left."""
    reached = []

    class Marks:
        def mark(self) -> int:
            return 0

        def reached(self, mark: int) -> bool:
            reached.append(mark)
            return False

    class Slow(_Layers):
        def capture(self, num_slots: int) -> None:
            before = len(reached)
            time.sleep(0.1)
            assert len(reached) == before
            super().capture(num_slots)

    watchdog = Watchdog(Marks(), timedelta(seconds=0.1), lambda error: None)
    watchdog.wait(SimpleNamespace(wait=lambda: None), PeerError)  # type: ignore[arg-type]
    of_slots = GraphSlots()
    of_slots.connect(SimpleNamespace(watchdog=watchdog))  # type: ignore[arg-type]
    watchdog.start()
    try:
        while not reached:
            time.sleep(0.001)
        of_slots.add(Slow(torch.nn.Module()))
    finally:
        watchdog.close()


def test_a_pass_has_the_slot_of_its_microbatch() -> None:
    of_slots, found = GraphSlots(), []
    of_slots.add(_Layers(torch.nn.Module()))
    iteration = _iteration("zb-h1", 8)
    with of_slots.iteration(iteration):
        run = of_slots.replacing(iteration, {Compute: lambda op, inputs: found.append(of_slots.current)})[Compute]
        for microbatch in range(8):
            run(Compute(Pass(0, Kind.F, microbatch)), ())
    assert found == [0, 1, 2, 3, 0, 1, 2, 3] and of_slots.current == 0


def test_other_lengths_are_refused() -> None:
    of_slots, call = GraphSlots(), SimpleNamespace(lengths=SimpleNamespace(differ=True))
    of_slots.begin(call)  # type: ignore[arg-type]
    of_slots.add(_Layers(torch.nn.Module()))
    with pytest.raises(UserError, match="captured for it; got different lengths"):
        of_slots.begin(call)  # type: ignore[arg-type]


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
    of_slots: Any = SimpleNamespace(current=0)
    graphs = [[lambda x: _Replay.apply(x, weight)] * 2]
    stage: Any = SimpleNamespace(layers=[module] * 2, graphs=graphs, delayed=[(), ()])
    layers = [GraphedLayer(stage, number, of_slots) for number in range(2)]
    x = torch.ones(3, requires_grad=True)
    y = layers[1](layers[0](x))
    y.sum().backward()
    sent = x.grad
    assert sent is not None and sent.data_ptr() != _Replay.memory.data_ptr()
    _Replay.memory.fill_(torch.nan)
    assert torch.equal(sent, torch.full((3,), 4.0))
