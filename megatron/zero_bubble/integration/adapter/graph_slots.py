"""Slots of CUDA graphs: which captured graph of a layer runs a microbatch, and how many are captured.

A slot has graphs, and memory, of its own. So any order of passes that respects a plan is right: a replay writes only to
the slot of its microbatch, and the slot is used again when the microbatch has run its W (``core.plan.slots``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Compute, Op, Pass
from megatron.zero_bubble.core.plan import Slots
from megatron.zero_bubble.engine.runtime.handler import Handler
from megatron.zero_bubble.engine.runtime.handlers import Stage
from megatron.zero_bubble.engine.runtime.watchdog import Watchdog
from megatron.zero_bubble.integration.adapter.part import Call, IterationFacts, Joined, Part
from megatron.zero_bubble.integration.adapter.stage import StageParts


class Captured(Protocol):
    """Layers of a stage whose graphs are captured slot by slot."""

    @property
    def num_slots(self) -> int:
        """How many slots have graphs."""

    def is_in(self, chunk: torch.nn.Module) -> bool: ...

    def capture(self, num_slots: int) -> None:
        """Capture graphs until ``num_slots`` slots have some; only called if there are fewer."""


class GraphSlots(Part):
    """Captures the graphs that an iteration needs, and tells graphed layers the slot of the running pass."""

    def __init__(self) -> None:
        self._captured: list[Captured] = []
        self._slots: Slots = {}
        self._work: Pass | None = None
        self._watchdog: Watchdog | None = None

    def add(self, layers: Captured) -> None:
        """From now on, capture what iterations need; one slot now, where the job expects a capture."""
        self._captured.append(layers)
        self._capture(layers, 1)

    def remove(self, layers: Captured) -> None:
        self._captured = [each for each in self._captured if each is not layers]

    @property
    def current(self) -> int:
        """The slot of the running pass."""
        work = self._work
        return 0 if work is None or work.stage not in self._slots else self._slots[work.stage][work.microbatch]

    def begin(self, call: Call) -> None:
        """See ``Part``.

        Raises:
            UserError: lengths that differ.
        """
        if self._captured and call.lengths.differ:
            raise UserError(
                "CUDA graphs need microbatches of one length, because they are captured for it; got different lengths; "
                "pad them to one length, or set --cuda-graph-impl none"
            )

    def connect(self, to: Joined) -> None:
        self._watchdog = to.watchdog

    def stages(self, iteration: IterationFacts, chunks: Sequence[StageParts]) -> Mapping[int, Stage]:
        """Capture the graphs that are missing, before any message is under way."""
        if self._captured and not iteration.forward_only:
            for own in chunks:
                number = max(iteration.prepared.slots[own.facts.stage]) + 1
                for layers in self._captured:
                    if layers.num_slots < number and layers.is_in(own.model):
                        self._capture(layers, number)
        return {}

    def _capture(self, layers: Captured, num_slots: int) -> None:
        with nullcontext() if self._watchdog is None else self._watchdog.paused():
            layers.capture(num_slots)

    @contextmanager
    def iteration(self, iteration: IterationFacts) -> Iterator[None]:
        """See ``Part``. An evaluation keeps nothing, and so needs one slot."""
        self._slots = iteration.prepared.slots if self._captured and not iteration.forward_only else {}
        try:
            yield
        finally:
            self._work = None

    def replacing(self, iteration: IterationFacts, basic: Mapping[type[Op], Handler]) -> Mapping[type[Op], Handler]:
        return {Compute: partial(self._run, basic[Compute])} if self._captured else {}

    def _run(self, run: Handler, op: Any, inputs: Sequence[Any]) -> Any:
        self._work = op.work
        return run(op, inputs)

    def close(self) -> None:
        self._watchdog = None
