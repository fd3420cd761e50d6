"""Data flow: the values that passes produce, and the passes that use them.

Dependencies, messages, the hand-over between passes, the tables of the search and the chains of the bounds are all
derived from a flow. ``Chain`` is the flow of a transformer: forwards run down the stages, and backwards run up again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir.passes import BW, B, F, Pass, R, W

OUT = "out"
"""Input of the next stage: an activation, or a gradient in the backward."""
SAVED = "saved"
"""Activations that an F saves for its backward: M_B of the Zero Bubble paper (arXiv 2401.10241, section 2); an R adds
those that it computes again."""
OPERANDS = "operands"
"""Tensors that a B leaves for its W: the paper's M_W."""
HISTORY = "history"
"""Value that one slice of a sequence passes to the next slice, or, in the backward, to the previous one."""


class Value(NamedTuple):
    """A value that ``producer`` makes for other passes; prints as the pass, with ``:name`` unless that is ``out``."""

    producer: Pass
    name: str = OUT

    def __str__(self) -> str:
        return str(self.producer) if self.name == OUT else f"{self.producer}:{self.name}"

    @classmethod
    def parse(cls, text: str) -> Value:
        """Read what ``str`` wrote.

        Raises:
            UserError: when ``text`` does not have this form.
        """
        producer, colon, name = text.partition(":")
        if colon and not re.fullmatch("[A-Za-z0-9_]+", name):
            raise UserError(f"a value is written <pass> or <pass>:<name>, for example 2F0:saved; got {text!r}")
        return cls(Pass.parse(producer), name or OUT)


class Flow(Protocol):
    """The passes as a graph; every method describes one pass or value, independent of the order of passes."""

    @property
    def sinks(self) -> tuple[int, ...]:
        """The stages at which the forward of a microbatch ends: they compute the loss."""
        ...

    def inputs(self, p: Pass) -> tuple[Value, ...]:
        """The values that ``p`` uses."""
        ...

    def outputs(self, p: Pass) -> tuple[Value, ...]:
        """The values of ``p`` that another pass uses."""
        ...

    def consumers(self, value: Value) -> tuple[Pass, ...]:
        """The passes that use ``value``."""
        ...


@dataclass(frozen=True)
class Chain:
    """The flow in which every stage uses the output of the previous one. Backwards run in the opposite direction;
    slices run in order in the forward, and in reverse order in the backward.

    Attributes:
        fused: the (stage, microbatch, slice) whose backward is one BW instead of B and W.
        recomputed: the (stage, microbatch, slice) whose activations a pass of its own (R) computes again.
        forward_only: whether there are no backwards, as in an evaluation.
    """

    num_stages: int
    num_slices: int = 1
    fused: frozenset[tuple[int, int, int]] = frozenset()
    recomputed: frozenset[tuple[int, int, int]] = frozenset()
    forward_only: bool = False

    @property
    def sinks(self) -> tuple[int, ...]:
        return (self.num_stages - 1,)

    def backward_of(self, stage: int, microbatch: int, slice_: int = 0) -> Pass:
        """The pass that computes the input gradient of ``stage``: its BW if fused, else its B."""
        fused = self.fused and (stage, microbatch, slice_) in self.fused
        return Pass(stage, BW if fused else B, microbatch, slice_)

    def saved_for(self, p: Pass) -> Value:
        """What the backward ``p`` takes of the forward of its stage."""
        stage, _, microbatch, slice_ = p
        again = self.recomputed and (stage, microbatch, slice_) in self.recomputed
        return Value(Pass(stage, R if again else F, microbatch, slice_), SAVED)

    def source(self, p: Pass) -> Pass | None:
        """The pass that determines when ``p`` can start, apart from slices: all other inputs of ``p`` exist earlier.
        None for the first F. Code that assumes a chain (the search, the bounds) reads dependencies from here.
        """
        inputs = self.inputs(p)
        return inputs[0].producer if inputs and inputs[0].name != HISTORY else None

    def inputs(self, p: Pass) -> tuple[Value, ...]:
        """The values that ``p`` uses; ``source`` produces the first one."""
        stage, kind, microbatch, slice_ = p
        if kind is W:
            return (Value(Pass(stage, B, microbatch, slice_), OPERANDS),)
        if kind is F:
            above = (Value(Pass(stage - 1, F, microbatch, slice_)),) if stage else ()
            return (*above, Value(Pass(stage, F, microbatch, slice_ - 1), HISTORY)) if slice_ else above
        if kind is R:
            return (Value(Pass(stage, F, microbatch, slice_), SAVED),)
        saved = self.saved_for(p)
        below = (Value(self.backward_of(stage + 1, microbatch, slice_)),) if stage < self.num_stages - 1 else ()
        if slice_ < self.num_slices - 1:
            return (*below, saved, Value(self.backward_of(stage, microbatch, slice_ + 1), HISTORY))
        return (*below, saved)

    def outputs(self, p: Pass) -> tuple[Value, ...]:
        stage, kind, _, slice_ = p
        if kind is W:
            return ()
        if kind is R:
            return (Value(p, SAVED),)
        forward = kind is F
        values = []
        if stage < self.num_stages - 1 if forward else stage:
            values.append(Value(p, OUT))
        if forward and not self.forward_only:
            values.append(Value(p, SAVED))
        if kind is B:
            values.append(Value(p, OPERANDS))
        if slice_ < self.num_slices - 1 if forward else slice_:
            values.append(Value(p, HISTORY))
        return tuple(values)

    def consumers(self, value: Value) -> tuple[Pass, ...]:
        """The one pass that uses ``value``."""
        (stage, kind, microbatch, slice_), name = value
        if name == OPERANDS:
            return (Pass(stage, W, microbatch, slice_),)
        if name == SAVED:
            backward = self.backward_of(stage, microbatch, slice_)
            saved = self.saved_for(backward)
            return (backward if saved == value else saved.producer,)
        step = 1 if kind is F else -1
        if name == OUT:
            stage += step
        else:
            slice_ += step
        return (Pass(stage, F, microbatch, slice_) if step > 0 else self.backward_of(stage, microbatch, slice_),)


def microbatch(flow: Flow) -> tuple[Pass, ...]:
    """The passes of microbatch 0, whose sequence is whole: each after those whose values it uses, and those that make
    no value at the end, by stage.
    """
    waits: dict[Pass, set[Pass]] = {}
    found = [Pass(0, F, 0)]
    for p in found:  # grows
        if p not in waits:
            waits[p] = {value.producer for value in flow.inputs(p)}
            found += [*waits[p], *(user for value in flow.outputs(p) for user in flow.consumers(value))]
    order = [p for p, producers in waits.items() if not producers]
    for p in order:  # grows
        for user in dict.fromkeys(user for value in flow.outputs(p) for user in flow.consumers(value)):
            waits[user].remove(p)
            if not waits[user]:
                order.append(user)
    makes = [p for p in order if flow.outputs(p)]
    return (*makes, *sorted((p for p in order if not flow.outputs(p)), key=lambda p: p.stage))
