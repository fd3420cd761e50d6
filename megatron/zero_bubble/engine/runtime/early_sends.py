"""Sends that start while the op that makes their values still runs.

An op that computes several passes, or the last weight gradients of a pass, has some of its values before it ends. The
sends that directly follow it start as soon as these values are there, in their order; the executor finds them started.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from megatron.zero_bubble.core.ir import Message, Op, Pass, Send, Value
from megatron.zero_bubble.engine.runtime.handler import Handler

HandOver = Callable[[Pass, Any], None]
"""Called with a pass of the running op and with its output for another stage, as soon as the output is there."""


class EarlySends:
    """The sends of one rank in one run of its plan.

    Args:
        ops: the ops of the rank.
        send: the handler of ``Send``.
    """

    def __init__(self, ops: Iterable[Op], send: Handler) -> None:
        self._send = send
        self._following: dict[Op, list[Send]] = {}
        self._started: set[Message] = set()
        following: list[Send] = []
        for op in ops:
            if isinstance(op, Send):
                following.append(op)
                continue
            following = []
            if op.works:
                self._following[op] = following

    def send(self, op: Send, inputs: Sequence[Any]) -> None:
        """The handler of ``Send``: starts what has not started early."""
        if op.message in self._started:
            self._started.remove(op.message)
        else:
            self._send(op, inputs)

    def during(self, op: Op) -> HandOver:
        """What the handler of ``op`` calls while it runs."""
        waiting = deque(self._following[op])
        outputs: dict[Value, Any] = {}

        def hand_over(work: Pass, output: Any) -> None:
            outputs[Value(work)] = output
            while waiting and waiting[0].message.value in outputs:
                following = waiting.popleft()
                self._send(following, (outputs[following.message.value],))
                self._started.add(following.message)
            if not waiting:
                outputs.clear()  # the stage keeps this function until its next pass

        return hand_over
