"""A handler may hand over what a pass of its op gives before the op ends: the sends that wait only for it start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from megatron.zero_bubble import build
from megatron.zero_bubble.core.ir import Compute, Op, Pair, Pass, Recv, Send, Settle, Value
from megatron.zero_bubble.core.plan import plan_of
from megatron.zero_bubble.engine.runtime.early_sends import EarlySends
from megatron.zero_bubble.engine.runtime.executor import Executor
from megatron.zero_bubble.engine.runtime.handler import Handler

PLAN = plan_of(build("dualpipe-v", num_ranks=2, num_microbatches=6, pairs=True))


def executed(rank: int, works: Callable[[Op], Sequence[Pass]]) -> list[str]:
    """The sends of a rank, with what they send, and the ends of the passes in its pairs, which end as in ``works``."""
    log: list[str] = []
    flow = PLAN.schedule.flow
    sends = EarlySends(PLAN.ops[rank], lambda op, inputs: log.append(f"{op} {inputs[0]}"))

    def run_pair(op: Pair, _inputs: Sequence[Any]) -> list[str]:
        hand_over = sends.during(op)
        for work in works(op):
            hand_over(work, str(Value(work)))
            log.append(f"{work} ended")
        return list(map(str, op.effects(flow).gives))

    handlers: dict[type[Op], Handler] = {
        Compute: lambda op, _: list(map(str, op.effects(flow).gives)),
        Pair: run_pair,
        Send: sends.send,
        Recv: lambda op, _: [str(op.message.value)],
        Settle: lambda op, _: None,
    }
    assert Executor(PLAN, rank, handlers).run()
    return log


@pytest.mark.parametrize("rank", [0, 1])
def test_sends_start_before_the_op_ends_and_run_once(rank: int) -> None:
    log = executed(rank, lambda op: op.works)
    sends = [op for op in PLAN.ops[rank] if isinstance(op, Send)]
    assert [line for line in log if ">" in line] == [f"{op} {op.message.value}" for op in sends]
    in_pairs = {work for op in PLAN.ops[rank] for work in (op.works if isinstance(op, Pair) else ())}
    early = [op for op in sends if op.message.producer in in_pairs]
    assert early
    for op in early:
        assert log.index(f"{op} {op.message.value}") == log.index(f"{op.message.producer} ended") - 1


def test_sends_keep_their_order_if_a_later_value_comes_first() -> None:
    log = executed(0, lambda op: op.works[::-1])
    sends = [str(op) for op in PLAN.ops[0] if isinstance(op, Send)]
    assert [line.split()[0] for line in log if ">" in line] == sends
