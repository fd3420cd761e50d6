"""Prove that a plan cannot deadlock, that every op has its inputs, and that every resource is released.

An op either never waits, or waits for tokens that other ranks make true and that stay true. A system of such ops is
deterministic: if one order of execution reaches the end, every order does, at any speed. One run in which each rank
advances as far as it can is therefore a proof, and a run that stops early shows the deadlock. The values on a rank
depend only on the order of its own ops, and are checked without a run.

``Queues`` lists stricter rules for transfers. ``prove_for_queues`` proves a plan for GPUs whose streams share hardware
queues, such as the single one that Megatron requires.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from enum import Enum

from megatron.zero_bubble.core.analysis.steps import Blocked, Step, run_to_end, steps
from megatron.zero_bubble.core.errors import PlanError
from megatron.zero_bubble.core.ir import Compute, Op, Plan, Recv, Send, Token, Validate
from megatron.zero_bubble.core.ir.collectives import Collective
from megatron.zero_bubble.core.ir.ops import STEPPED
from megatron.zero_bubble.core.ir.plan import Unrolled
from megatron.zero_bubble.core.plan.unroll import can_repeat


class Queues(Enum):
    """Which transfers of a rank wait for each other."""

    CHANNEL = "one queue per channel: a transfer waits for nothing but its sender and its receiver"
    DIRECTION = (
        "one queue per rank and direction, as in eagerly created communicators of NCCL, which hold all ranks: a "
        "transfer also waits for those that were issued before it in the same direction on either rank"
    )
    DEVICE = (
        "one hardware queue per device (CUDA_DEVICE_MAX_CONNECTIONS=1): a transfer that waits for the previous one on "
        "its channel, or a collective for that on its lane, blocks everything that the rank issues afterwards"
    )


def prove(plan: Plan, queues: Queues = Queues.CHANNEL) -> None:
    """Run ``plan`` without time to its end. If it validates, also run it until every rank has stopped and drained.

    Of a plan whose ops are ``Unrolled``, the stem runs, and the inserted windows are proved by induction, except with
    one queue per direction.

    Raises:
        PlanError: for a pass without its inputs, a send without a matching receive, or a buffer that is never released;
            the message shows the position on the rank. Also for ranks that wait for each other; the message marks the
            op of each rank.
    """
    if isinstance(plan.ops, Unrolled):
        try:
            rows = _prove_whole(replace(plan.stem, drain=plan.drain), queues)
            if (
                queues is not Queues.DIRECTION
                and plan.ops.lasts_as_long_as(plan.schedule)
                and can_repeat(plan.ops, rows)
            ):
                return
        except PlanError:
            pass  # the error for the whole plan shows its own microbatches
        plan = replace(plan, ops=tuple(plan.ops))
    _prove_whole(plan, queues)


def _prove_whole(plan: Plan, queues: Queues) -> list[list[Step]]:
    """Prove a plan op by op; return its steps."""
    rows = _prove_run(plan, queues)
    if plan.drain:
        begun = (ops[: ops.index(Validate())] for ops in plan.ops)
        stopped = tuple((*ops, *drain) for ops, drain in zip(begun, plan.drain, strict=True))
        _prove_run(replace(plan, ops=stopped), queues, stopped=True)
    return rows


def num_channels(plan: Plan) -> int:
    """The largest number of channels of a rank; each is opened together with its way back."""
    ways = {way for channel in plan.channels for way in (channel, channel[::-1])}
    return max(Counter(rank for way in ways for rank in way).values(), default=0)


def num_streams(plan: Plan) -> int:
    """The largest number of streams that the passes, messages and collectives of a rank take on a GPU.

    A kind of collective has a lane, and a communicator whose own stream is used when it is joined.
    """
    kinds = {op.lane for row in plan.stem.ops for op in row if isinstance(op, Collective)}
    return 1 + num_channels(plan) + 2 * len(kinds)


def prove_for_queues(
    plan: Plan, num_queues: int = 1, setting: str = "CUDA_DEVICE_MAX_CONNECTIONS is 1", several: str | None = "32"
) -> bool:
    """Prove a plan for GPUs with ``num_queues`` hardware queues each; return whether that took a proof, which then also
    holds for a queue per channel: with fewer queues, transfers only wait for more.

    If there are fewer queues than streams, some streams share one. CUDA does not say which, so the plan is then proved
    for a single queue. What ends there ends with any number: a task waits for those before it in its own queue, and in
    a single queue it waits for all of these, too.

    Args:
        setting: why there are so few queues: a variable of the environment and its value.
        several: the value of the variable with which there are more; None where a job cannot choose it.

    Raises:
        PlanError: when the ranks could block each other; the message states the remedy.
    """
    needed = num_streams(plan)
    if num_queues >= needed:
        return False
    try:
        prove(plan, Queues.DEVICE)
    except PlanError as error:
        more = "" if several is None else f"set it to {several}, or "
        raise PlanError(
            f"schedule {plan.schedule.name!r} needs several hardware queues per GPU: {needed}, one for each of its "
            f"streams; {setting}; {more}choose another schedule. {error}"
        ) from error
    return True


def _prove_run(plan: Plan, queues: Queues, stopped: bool = False) -> list[list[Step]]:
    kinds = dict.fromkeys(type(op) for row in plan.ops for op in row)
    always: tuple[type[Op], ...] = (Compute,) if stopped or not plan.drain else (Compute, Validate)
    for kind in dict.fromkeys((*always, *kinds)):
        for sentence, rank in kind.faults(plan.schedule, plan.ops, stopped):
            raise PlanError(f"plan for {plan.schedule.name!r} refused: rank {rank}: {sentence}.")

    def refuse(sentence: str, rank: int, position: int) -> None:
        raise _error(plan, sentence, {rank: position}, rank)

    rows = steps(plan, refuse, stopped)
    transfers: list[list[Step]] = []
    if queues is Queues.DEVICE:
        rows = in_one_queue(rows)
    elif queues is Queues.DIRECTION:
        rows, transfers = _in_queues_of_directions(rows)
    try:
        run_to_end([*rows, *transfers], (STEPPED,))  # the previous iteration has ended
    except Blocked as blocked:
        positions = dict(enumerate(blocked.positions[: len(rows)]))
        raise _error(plan, "the ranks wait for each other", positions) from None
    return rows


def in_one_queue(rows: list[list[Step]]) -> list[list[Step]]:
    """Make every transfer also wait until its other ranks have issued the one before it in the same stream.

    A transfer is one kernel, which leaves the queue when it starts, before it ends. The next one of its stream waits at
    the front of the queue until it has ended.
    """
    return [[*_held_back(row)] for row in rows]


def stream_of(op: Op) -> Hashable:
    """The stream of a rank in which a transfer runs after those issued before it; None for other ops."""
    if isinstance(op, Collective):
        return op.lane
    return (type(op), op.message.channel) if isinstance(op, (Send, Recv)) else None


def _held_back(row: Iterable[Step]) -> Iterator[Step]:
    ends: dict[Hashable, tuple[Token, ...]] = {}  # by stream, the tokens of the other ranks of the last transfer
    for step in row:
        op = step.op
        if (stream := stream_of(op)) is None:
            yield step
            continue
        yield step._replace(waits=(*step.waits, *ends.get(stream, ())))
        if isinstance(op, Collective):
            ends[stream] = op.arrival()
        elif isinstance(op, (Send, Recv)):
            ends[stream] = (Token("posted" if isinstance(op, Send) else "sent", op.message),)


def _in_queues_of_directions(rows: list[list[Step]]) -> tuple[list[list[Step]], list[list[Step]]]:
    """Let ranks wait for transfers that have ended, and return the rows of the queues, which transfer.

    A transfer is two steps on either rank: its queue comes to it, and then both queues have come to it.
    """
    queues: defaultdict[tuple[int, bool], list[Step]] = defaultdict(list)

    def ended(step: Step) -> Step:
        of_transfers = [token for token in step.waits if isinstance(token, Token) and token.fact in ("sent", "posted")]
        others = [token for token in step.waits if token not in of_transfers]
        return step._replace(waits=(*others, *(Token("transferred", token.of) for token in of_transfers)))

    for rank, row in enumerate(rows):
        for op in (step.op for step in row if isinstance(step.op, (Send, Recv))):
            issued, other = ("sent", "posted") if isinstance(op, Send) else ("posted", "sent")
            source, target = op.message.channel
            own, theirs = (Token(f"in turn after {fact}", op.message) for fact in (issued, other))
            queues[rank, source < target] += [
                Step(op, (), (Token(issued, op.message),), (own,)),
                Step(op, (), (theirs,), (Token("transferred", op.message),)),
            ]
    return [list(map(ended, row)) for row in rows], list(queues.values())


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
