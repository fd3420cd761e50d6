"""The executor: a loop over one rank's ops, and a table of the values that the rank holds.

The executor reads only the declared effects of an op; the handler of the op's class does the work. The same loop trains
a GPT model and runs the emulated stages of the tests, which only advance a clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Op, Plan
from megatron.zero_bubble.core.ir.registers import Registers
from megatron.zero_bubble.engine.runtime.handler import FORGOTTEN, STOP, Awaited, Handler
from megatron.zero_bubble.engine.runtime.observer import IterationObserver


class Executor:
    """Runs one rank's ops of a plan.

    Args:
        plan: a proved plan.
        rank: the pipeline rank, which selects the row of the plan.
        handlers: handlers by class of op.
        observer: is notified of every op that occupies a lane; None adds no overhead.

    Raises:
        UserError: the plan has an op without a handler.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        handlers: Mapping[type[Op], Handler],
        observer: IterationObserver | None = None,
    ) -> None:
        self._ops, self._drain, self._registers = plan.executable(rank)
        first_of_kind = {type(op): op for op in (*self._drain, *reversed(self._ops))}
        if missing := [op for kind, op in first_of_kind.items() if kind not in handlers]:
            raise UserError(
                f"every op of a plan needs a handler in this version; {plan.schedule.name!r} has {missing[0]} on rank "
                f"{rank}, which has none; plan the schedule without ops of this kind"
            )
        self._handlers = handlers
        self._observer = observer
        self._table: list[Any] = [None] * self._registers.size

    def run(self) -> bool:
        """Execute every op, in order.

        Returns:
            False if the last optimizer step was rejected. All messages are then drained, the results of this iteration
            are invalid, and the caller must run it again.

        Raises:
            PeerError: another rank failed or hangs; the message names the rank, the pass and the channel. With NCCL,
                the watchdog ends the process with this message instead.
        """
        try:
            if self._execute(self._ops, self._registers.row):
                assert self._table.count(None) == len(self._table), "a proved plan must leave no values in the table"
                return True
            self._stop()
        except BaseException:
            self._table.clear()  # an error keeps the frames of its traceback, and they would keep the values
            raise
        if self._observer is not None:
            self._observer.restarted()
        return False

    def _stop(self) -> None:
        """Drain the messages in flight, as all ranks do here; their contents are discarded."""
        self._table = [FORGOTTEN if held is None else held for held in self._table]
        self._execute(self._drain, self._registers.drain)
        for held in self._table:
            if isinstance(held, Awaited):
                held.wait("stop")
        self._table = [None] * len(self._table)

    def _execute(self, ops: Sequence[Op], registers: Sequence[Registers]) -> bool:
        """Run ``ops``; returns False as soon as a handler returns ``STOP``."""
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
        for place, held in enumerate(inputs):
            if isinstance(held, Awaited):
                inputs[place] = self._table[reads[place]] = held.wait(op)  # another op may read it too
