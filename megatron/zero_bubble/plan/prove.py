"""Prove that a plan cannot deadlock, that every op has its inputs, and that every resource is released.

An op either never waits, or waits for tokens that other ranks make true and that stay true. A system of such ops is
deterministic: if one order of execution reaches the end, every order does, at any speed. One run in which each rank
advances as far as it can is therefore a proof, and a run that stops early shows the deadlock. The values on a rank
depend only on the order of its own ops, and are checked without a run.

``prove_single_queue`` proves a plan under the stricter rule of one hardware queue per device, which Megatron requires
(CUDA_DEVICE_MAX_CONNECTIONS=1): a transfer that waits for the previous one on its channel blocks everything that the
rank issues afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron.zero_bubble.analysis.steps import Blocked, Step, run_to_end, steps
from megatron.zero_bubble.errors import PlanError
from megatron.zero_bubble.ir import Compute, Message, Op, Plan, Recv, Send, Token, Validate
from megatron.zero_bubble.ir.ops import STEPPED
from megatron.zero_bubble.ir.unrolled import Unrolled
from megatron.zero_bubble.plan.unroll import can_repeat


def prove(plan: Plan, single_queue: bool = False) -> None:
    """Run ``plan`` without time to its end. If it validates, also run it until every rank has stopped and drained.

    Of a plan whose ops are ``Unrolled``, the stem runs, and the inserted windows are proved by induction.

    Raises:
        PlanError: for a pass without its inputs, a send without a matching receive, or a buffer that is never released;
            the message shows the position on the rank. Also for ranks that wait for each other; the message marks the
            op of each rank.
    """
    if isinstance(plan.ops, Unrolled):
        try:
            rows = _prove_whole(replace(plan.stem, drain=plan.drain), single_queue)
            if plan.ops.lasts_as_long_as(plan.schedule) and can_repeat(plan.ops, rows):
                return
        except PlanError:
            pass  # the error for the whole plan shows its own microbatches
        plan = replace(plan, ops=tuple(plan.ops))
    _prove_whole(plan, single_queue)


def _prove_whole(plan: Plan, single_queue: bool) -> list[list[Step]]:
    """Prove a plan op by op; return its steps."""
    rows = _prove_run(plan, single_queue)
    if plan.drain:
        begun = (ops[: ops.index(Validate())] for ops in plan.ops)
        stopped = tuple((*ops, *drain) for ops, drain in zip(begun, plan.drain, strict=True))
        _prove_run(replace(plan, ops=stopped), single_queue, stopped=True)
    return rows


def prove_single_queue(plan: Plan) -> None:
    """Prove a plan for GPUs with the single hardware queue that Megatron requires.

    Raises:
        PlanError: when the ranks would block each other; the message states the remedy.
    """
    try:
        prove(plan, single_queue=True)
    except PlanError as error:
        raise PlanError(
            f"schedule {plan.schedule.name!r} needs several hardware queues per GPU; CUDA_DEVICE_MAX_CONNECTIONS is 1; "
            f"set it to 8, or choose another schedule. {error}"
        ) from error


def _prove_run(plan: Plan, single_queue: bool, stopped: bool = False) -> list[list[Step]]:
    kinds = dict.fromkeys(type(op) for row in plan.ops for op in row)
    always: tuple[type[Op], ...] = (Compute,) if stopped or not plan.drain else (Compute, Validate)
    for kind in dict.fromkeys((*always, *kinds)):
        for sentence, rank in kind.faults(plan, stopped):
            raise PlanError(f"plan for {plan.schedule.name!r} refused: rank {rank}: {sentence}.")

    def refuse(sentence: str, rank: int, position: int) -> None:
        raise _error(plan, sentence, {rank: position}, rank)

    rows = steps(plan, refuse, stopped)
    if single_queue:
        rows = _in_one_queue(plan, rows)
    try:
        run_to_end(rows, (STEPPED,))  # the previous iteration has ended
    except Blocked as blocked:
        raise _error(plan, "the ranks wait for each other", dict(enumerate(blocked.positions))) from None
    return rows


def _in_one_queue(plan: Plan, rows: list[list[Step]]) -> list[list[Step]]:
    """Make every transfer also wait until the other rank has issued the previous transfer on the same channel."""
    last: dict[tuple[type[Op], tuple[int, int]], Message] = {}

    def held_back(step: Step) -> Step:
        op = step.op
        if not isinstance(op, (Send, Recv)):
            return step
        before = last.get((type(op), op.message.channel))
        last[type(op), op.message.channel] = op.message
        if before is None:
            return step
        return step._replace(waits=(*step.waits, Token("posted" if isinstance(op, Send) else "sent", before)))

    return [list(map(held_back, row)) for row in rows]


def _error(plan: Plan, what: str, positions: Mapping[int, int], bad: int | None = None) -> PlanError:
    """Make the error; ``positions`` are the positions that the relevant ranks reached, ``bad`` is the rank to mark."""
    lines = [f"plan for {plan.schedule.name!r} refused: {what}."]
    for rank, position in positions.items():
        ops = plan.ops[rank]
        before = " ".join(map(str, ops[max(0, position - 6) : position]))
        after = " ".join(map(str, ops[position + 1 : position + 4]))
        here = f"[{ops[position]}]" if position < len(ops) else "(end)"
        mark = ">" if bad in (None, rank) and position < len(ops) else " "
        lines.append(f"{mark} rank {rank}: ... {before} {here} {after}")
    return PlanError("\n".join(lines))
