"""Who feeds whom: the values that passes make, and the passes that take them.

Dependencies, messages, the hand-over between passes, the search's tables and the chains of the bounds are all derived
from a flow. ``Chain`` is the transformer's: forwards go down the stages, backwards come up again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.ir.passes import Kind, Pass

OUT = "out"
"""What the next stage takes in: an activation, or a gradient on the way back."""
SAVED = "saved"
"""What an F saves for its backward: M_B of the Zero Bubble paper (arXiv 2401.10241, section 2)."""
OPERANDS = "operands"
"""What a B leaves for its W: the paper's M_W."""
HISTORY = "history"
"""What one slice of a sequence hands to the next, or, on the way back, to the one before."""


class Value(NamedTuple):
    """What ``producer`` makes for other passes; prints as the pass, followed by its name unless that is ``out``."""

    producer: Pass
    name: str = OUT

    def __str__(self) -> str:
        return str(self.producer) if self.name == OUT else f"{self.producer}:{self.name}"

    @classmethod
    def parse(cls, text: str) -> Value:
        """Read what ``str`` wrote.

        Raises:
            UserError: when ``text`` is not of that form.
        """
        producer, colon, name = text.partition(":")
        if colon and not re.fullmatch(r"\w+", name):
            raise UserError(f"a value is written <pass> or <pass>:<name>, for example 2F0:saved; got {text!r}")
        return cls(Pass.parse(producer), name or OUT)


class Flow(Protocol):
    """The passes as a graph; every method is a question about one pass or value, and none looks at the order."""

    @property
    def sinks(self) -> tuple[int, ...]:
        """The stages at which the forward of a microbatch ends: they compute the loss."""
        ...

    def inputs(self, p: Pass) -> tuple[Value, ...]:
        """What ``p`` takes."""
        ...

    def outputs(self, p: Pass) -> tuple[Value, ...]:
        """What ``p`` makes, as far as some pass takes it."""
        ...

    def consumers(self, value: Value) -> tuple[Pass, ...]:
        """The passes that take ``value``."""
        ...


@dataclass(frozen=True)
class Chain:
    """Every stage takes the output of the one before; backwards run the other way; slices run in order, and back in
    reverse.

    Attributes:
        fused: the (stage, microbatch, slice) whose backward is one BW instead of B and W.
        forward_only: whether there are no backwards, as in an evaluation.
    """

    num_stages: int
    num_slices: int = 1
    fused: frozenset[tuple[int, int, int]] = frozenset()
    forward_only: bool = False

    @property
    def sinks(self) -> tuple[int, ...]:
        """The last stage."""
        return (self.num_stages - 1,)

    def backward_of(self, stage: int, microbatch: int, slice_: int = 0) -> Pass:
        """The pass that makes the input gradient of ``stage``: its BW where fused, else its B."""
        fused = self.fused and (stage, microbatch, slice_) in self.fused
        return Pass(stage, Kind.BW if fused else Kind.B, microbatch, slice_)

    def source(self, p: Pass) -> Pass | None:
        """The one pass that decides when ``p`` can start, slices aside: whatever else ``p`` takes was there before.
        None for the first F. What assumes a chain (the search, the bounds) reads dependencies from here.
        """
        inputs = self.inputs(p)
        return inputs[0].producer if inputs and inputs[0].name != HISTORY else None

    def inputs(self, p: Pass) -> tuple[Value, ...]:
        """What ``p`` takes; ``source`` makes the first."""
        stage, kind, microbatch, slice_ = p
        if kind is Kind.W:
            return (Value(Pass(stage, Kind.B, microbatch, slice_), OPERANDS),)
        if kind is Kind.F:
            above = (Value(Pass(stage - 1, Kind.F, microbatch, slice_)),) if stage else ()
            return (*above, Value(Pass(stage, Kind.F, microbatch, slice_ - 1), HISTORY)) if slice_ else above
        inputs = []
        if stage < self.num_stages - 1:
            inputs.append(Value(self.backward_of(stage + 1, microbatch, slice_)))
        inputs.append(Value(Pass(stage, Kind.F, microbatch, slice_), SAVED))
        if slice_ < self.num_slices - 1:
            inputs.append(Value(self.backward_of(stage, microbatch, slice_ + 1), HISTORY))
        return tuple(inputs)

    def outputs(self, p: Pass) -> tuple[Value, ...]:
        """What ``p`` makes, as far as some pass takes it."""
        stage, kind, _, slice_ = p
        if kind is Kind.W:
            return ()
        forward = kind is Kind.F
        names = []
        if stage < self.num_stages - 1 if forward else stage:
            names.append(OUT)
        if forward and not self.forward_only:
            names.append(SAVED)
        if kind is Kind.B:
            names.append(OPERANDS)
        if slice_ < self.num_slices - 1 if forward else slice_:
            names.append(HISTORY)
        return tuple(Value(p, name) for name in names)

    def consumers(self, value: Value) -> tuple[Pass, ...]:
        """The one pass that takes ``value``."""
        (stage, kind, microbatch, slice_), name = value
        if name == OPERANDS:
            return (Pass(stage, Kind.W, microbatch, slice_),)
        if name == SAVED:
            return (self.backward_of(stage, microbatch, slice_),)
        step = 1 if kind is Kind.F else -1
        if name == OUT:
            stage += step
        else:
            slice_ += step
        return (Pass(stage, Kind.F, microbatch, slice_) if step > 0 else self.backward_of(stage, microbatch, slice_),)
