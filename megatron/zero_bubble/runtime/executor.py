"""The executor: a loop over one rank's ops and a table of what the rank has.

It knows what an op declares, and nothing else: what an op does is the business of the handler of its class. The same
loop trains a GPT, and runs stages that only keep a clock (``emulate``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from megatron.zero_bubble.ir import Effects, Op, Plan, Value
from megatron.zero_bubble.runtime.observer import IterationObserver

STOP = object()
"""What a handler returns when the plan must stop here, with all other ranks."""


Handler = Callable[[Any, list[Any]], Any]
"""Runs the ops of one class.

It gets the op, and what the op uses and then takes, as its ``effects`` list them. It returns what the op gives, by what
its ``effects`` list, None where the executor need not keep it, or ``STOP``.
"""


class Awaited(ABC):
    """Something that is still on its way."""

    @abstractmethod
    def wait(self, needed_by: object) -> Any:
        """The thing itself, once it is here."""


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
        self._handlers = handlers
        self._observer = observer
        self._row = plan.ops[rank], plan.effects[rank]
        drain = plan.drain[rank] if plan.drain else ()
        self._drain = drain, [op.effects(plan.schedule.flow) for op in drain]
        self._uses_left = dict(plan.shared[rank])
        self._table: dict[Hashable, Any] = {}

    def run(self) -> bool:
        """Execute every op, in order.

        Returns:
            False when the last optimizer step was wrong: nothing of this iteration counts, no message is left behind,
            and it is to be run again.

        Raises:
            PeerError: another rank died or hangs; the text names it, the pass and the channel.
        """
        if self._execute(*self._row):
            assert not self._table, "a proved plan leaves nothing behind"
            return True
        # Stop here, with all other ranks: take and give what is under way, for nothing.
        self._uses_left.clear()
        self._execute(*self._drain)
        for held in self._table.values():
            if isinstance(held, Awaited):
                held.wait("stop")
        self._table.clear()
        if self._observer is not None:
            self._observer.restarted()
        return False

    def _execute(self, ops: Sequence[Op], effects: Sequence[Effects]) -> bool:
        """Run ``ops``; False where a handler says stop."""
        handlers, observer, table, take = self._handlers, self._observer, self._table, self._take
        for op, (uses, _, takes, *_) in zip(ops, effects, strict=True):
            inputs = [take(value, op) for value in uses]
            if takes:
                inputs += [table.pop(resource, None) for resource in takes]
            if observer is None or op.lane is None:
                outputs = handlers[type(op)](op, inputs)
            else:
                observer.begin(op)
                outputs = handlers[type(op)](op, inputs)
                observer.end(op)
            if outputs is STOP:
                return False
            if outputs is not None:
                table.update(outputs)
        return True

    def _take(self, value: Value, needed_by: Op) -> Any:
        """What ``needed_by`` uses; its last user takes it out of the table."""
        held = self._table.pop(value, None)
        if isinstance(held, Awaited):
            held = held.wait(needed_by)
        if self._uses_left and (left := self._uses_left.pop(value, 1)) > 1:
            self._uses_left[value] = left - 1
            self._table[value] = held
        return held
