"""The executor: a loop over one rank's ops and a table of what the rank has.

It knows what an op declares, and nothing else: what an op does is the business of the handler of its class. The same
loop trains a GPT, and runs stages that only keep a clock (``emulate``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.zero_bubble.ir import Op, Plan
from megatron.zero_bubble.ir.registers import Registers
from megatron.zero_bubble.runtime.observer import IterationObserver

STOP = object()
"""What a handler returns when the plan must stop here, with all other ranks."""

FORGOTTEN = object()
"""What stands for a value that the ranks gave up, or never made, when they stopped."""

Handler = Callable[[Any, Sequence[Any]], Any]
"""Runs the ops of one class.

It gets the op, and the values that the op uses and then takes, as its ``effects`` list them. It returns the values that
the op gives, in that order, or ``STOP``.
"""


class Awaited:
    """Something that is still on its way."""

    def wait(self, needed_by: object) -> Any:
        """The thing itself, once it is here."""
        raise NotImplementedError


class Executor:
    """Runs one rank's ops of a plan.

    Args:
        plan: a proved plan.
        rank: which row of the plan is ours.
        handlers: by class of op.
        observer: sees every op that occupies a lane; None costs nothing.
    """

    def __init__(
        self, plan: Plan, rank: int, handlers: Mapping[type[Op], Handler], observer: IterationObserver | None = None
    ) -> None:
        self._ops = plan.ops[rank]
        self._drain = plan.drain[rank] if plan.drain else ()
        self._registers = plan.allocations[rank]
        self._handlers = handlers
        self._observer = observer
        self._table: list[Any] = [None] * self._registers.size

    def run(self) -> bool:
        """Execute every op, in order.

        Returns:
            False when the last optimizer step was wrong: nothing of this iteration counts, no message is left behind,
            and it is to be run again.

        Raises:
            PeerError: another rank died or hangs; the text names it, the pass and the channel.
        """
        if self._execute(self._ops, self._registers.row):
            assert self._table.count(None) == len(self._table), "a proved plan leaves nothing behind"
            return True
        # Stop here, with all other ranks: take and give what is under way, for nothing.
        self._table = [FORGOTTEN if held is None else held for held in self._table]
        self._execute(self._drain, self._registers.drain)
        for held in self._table:
            if isinstance(held, Awaited):
                held.wait("stop")
        self._table = [None] * len(self._table)
        if self._observer is not None:
            self._observer.restarted()
        return False

    def _execute(self, ops: Sequence[Op], registers: Sequence[Registers]) -> bool:
        """Run ``ops``; False where a handler says stop."""
        handlers, observer, table = self._handlers, self._observer, self._table
        for op, (reads, may_wait, ends, writes) in zip(ops, registers, strict=True):
            inputs = []
            for register in reads:
                inputs.append(table[register])
            if may_wait:
                self._await(op, reads, inputs)
            for register in ends:
                table[register] = None
            if observer is None or op.lane is None:
                outputs = handlers[type(op)](op, inputs)
            else:
                observer.begin(op)
                outputs = handlers[type(op)](op, inputs)
                observer.end(op)
            if outputs is STOP:
                return False
            for place, register in enumerate(writes):
                table[register] = outputs[place]
        return True

    def _await(self, op: Op, reads: Sequence[int], inputs: list[Any]) -> None:
        """Wait until all that ``op`` reads is there."""
        for place, held in enumerate(inputs):
            if isinstance(held, Awaited):
                inputs[place] = self._table[reads[place]] = held.wait(op)  # another op may read it too
