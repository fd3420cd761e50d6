"""Sharded units, as ops: a chunk's weights and gradients are whole on a rank only while its passes need them.

    2:gather@0    start to gather the weights of stage 2 from the shards of all replicas, in slot 0 of the rank
    2:wait        wait until the weights are whole
    2:release@0   free them, and the slot
    2:open        allocate the gradients of stage 2, all zero
    2:reduce      start to add the gradients over all replicas; every replica receives its shard
    2:close       wait for the sum, add it to that of earlier units, and free the gradients

The method is that of breadth-first pipeline parallelism (arXiv 2211.05953) and of ZeroPP (arXiv 2402.03791): one
gather and one reduction serve a whole unit of microbatches. F and B need whole weights, B and W need open gradients. W
needs no weights, so these are released before the last W's.

All replicas run the same row, so their collectives match. Those of a rank run in order on one lane. A rank has a fixed
number of slots, which the proof treats as any other resource: two chunks in one slot are an error, and so is a slot
that is never released.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from megatron.zero_bubble.core.ir.flow import Flow, Value
from megatron.zero_bubble.core.ir.ops import COMPUTE, NET, Effects, Op, Rows, Times
from megatron.zero_bubble.core.ir.passes import BW, B, F, Pass, W
from megatron.zero_bubble.core.ir.schedule import Schedule
from megatron.zero_bubble.core.ir.slices import Slices

NEED_WEIGHTS = (F, B, BW)
NEED_GRADIENTS = (B, BW, W)


class Slot(NamedTuple):
    """Room for the whole weights of one chunk of a rank."""

    number: int

    def __str__(self) -> str:
        return f"slot {self.number}"


@dataclass(frozen=True, slots=True)
class _OfStage(Op):
    """An op on the weights or the gradients of ``stage``."""

    stage: int
    word: ClassVar[str]

    def __str__(self) -> str:
        return f"{self.stage}:{self.word}"

    def _value(self, state: str) -> Value:
        """The weights or gradients in a state. A value has a producer; this one is named after the first forward."""
        return Value(Pass(self.stage, F, 0), state)

    @property
    def gathering(self) -> Value:
        """Weights that are not whole yet."""
        return self._value("gathering")

    @property
    def weights(self) -> Value:
        return self._value("weights")

    @property
    def gradients(self) -> Value:
        """Gradients to which passes add."""
        return self._value("gradients")

    @property
    def reducing(self) -> Value:
        """Gradients of which the sum over all replicas is not there yet."""
        return self._value("reducing")

    @classmethod
    def parse(cls, text: str, rank: int) -> _OfStage | None:
        match = re.fullmatch(rf"([0-9]+):{cls.word}", text)
        return cls(int(match[1])) if match else None


@dataclass(frozen=True, slots=True)
class _InSlot(_OfStage):
    """An op that occupies or frees ``slot``."""

    slot: int

    def __str__(self) -> str:
        return f"{self.stage}:{self.word}@{self.slot}"

    @classmethod
    def parse(cls, text: str, rank: int) -> _InSlot | None:
        match = re.fullmatch(rf"([0-9]+):{cls.word}@([0-9]+)", text)
        return cls(int(match[1]), int(match[2])) if match else None


class Gather(_InSlot):
    """Allocate the weights and start to gather them; never waits."""

    __slots__ = ()
    lane: ClassVar[str] = NET
    word = "gather"

    def effects(self, flow: Flow) -> Effects:
        return Effects(gives=(self.gathering, Slot(self.slot)))

    def duration_ms(self, times: Times, slices: Slices) -> float:
        return times.gather(self.stage)


class Wait(_OfStage):
    """Wait until the weights are whole."""

    __slots__ = ()
    lane: ClassVar[str] = COMPUTE
    word = "wait"

    def effects(self, flow: Flow) -> Effects:
        return Effects(takes=(self.gathering,), gives=(self.weights,))

    @classmethod
    def faults(cls, schedule: Schedule, rows: Rows, stopped: bool) -> Iterator[tuple[str, int]]:
        """Check that every F and B runs while the weights of its stage are whole."""
        for rank, row in enumerate(rows):
            whole: set[int] = set()
            for op in row:
                if isinstance(op, Wait):
                    whole.add(op.stage)
                elif isinstance(op, ReleaseWeights):
                    whole.discard(op.stage)
                for work in op.works:
                    if work.kind in NEED_WEIGHTS and work.stage not in whole:
                        yield f"{op} runs while the weights of stage {work.stage} are not whole", rank


class ReleaseWeights(_InSlot):
    """Free the weights; the replica's shard stays."""

    __slots__ = ()
    word = "release"

    def effects(self, flow: Flow) -> Effects:
        return Effects(takes=(self.weights, Slot(self.slot)))


class Open(_OfStage):
    """Allocate gradients, all zero."""

    __slots__ = ()
    word = "open"

    def effects(self, flow: Flow) -> Effects:
        return Effects(gives=(self.gradients,))

    @classmethod
    def faults(cls, schedule: Schedule, rows: Rows, stopped: bool) -> Iterator[tuple[str, int]]:
        """Check that every B and W runs while the gradients of its stage are open, and none while they are reduced."""
        for rank, row in enumerate(rows):
            is_open: set[int] = set()
            closing: set[int] = set()
            for op in row:
                if isinstance(op, Open):
                    if op.stage in closing:
                        yield f"{op} begins before the gradients of the unit before are closed", rank
                    is_open.add(op.stage)
                elif isinstance(op, Reduce):
                    is_open.discard(op.stage)
                    closing.add(op.stage)
                elif isinstance(op, Close):
                    closing.discard(op.stage)
                for work in op.works:
                    if work.kind in NEED_GRADIENTS and work.stage not in is_open:
                        yield f"{op} runs while the gradients of stage {work.stage} are not open", rank


class Reduce(_OfStage):
    """Start to add the gradients over all replicas; never waits."""

    __slots__ = ()
    lane: ClassVar[str] = NET
    word = "reduce"

    def effects(self, flow: Flow) -> Effects:
        return Effects(takes=(self.gradients,), gives=(self.reducing,))

    def duration_ms(self, times: Times, slices: Slices) -> float:
        return times.reduce(self.stage)


class Close(_OfStage):
    """Wait for the sum over all replicas, add the own shard of it to that of earlier units, and free the gradients."""

    __slots__ = ()
    lane: ClassVar[str] = COMPUTE
    word = "close"

    def effects(self, flow: Flow) -> Effects:
        return Effects(takes=(self.reducing,))


SHARD_OPS: tuple[type[Op], ...] = (Gather, Wait, ReleaseWeights, Open, Reduce, Close)
