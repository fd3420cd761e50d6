"""The proof that a plan cannot deadlock, by running it once without time.

Every op either never waits, or waits for an op of another rank that, once done, stays done. Such a system is
deterministic: if one order of execution reaches the end, every order does, at any speed. So one run of the ranks
against each other, each going as far as it can, is a proof; a run that stops short shows the deadlock.

``single_queue`` proves it under the stricter rule of one hardware queue a device (CUDA_DEVICE_MAX_CONNECTIONS=1, which
Megatron asks for): a transfer that waits for the previous one of its channel holds back all that the rank issues after.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron.zero_bubble.errors import PlanError
from megatron.zero_bubble.ir import Pass
from megatron.zero_bubble.plan.ops import Compute, Message, Plan, Recv, Send, Settle, Validate


def prove(plan: Plan, single_queue: bool = False) -> None:
    """Run ``plan`` without time until every rank is through; then, if it validates, from the start until every rank has
    stopped and drained.

    Raises:
        PlanError: a pass without its inputs, a send and a receive that do not match, a buffer never released, or ranks
            that wait for each other; with the op of each rank marked.
    """
    _Proof(plan, single_queue).run()
    if plan.drain:
        begun = (ops[: ops.index(Validate())] for ops in plan.ops)
        stopped = tuple((*ops, *drain) for ops, drain in zip(begun, plan.drain, strict=True))
        _Proof(replace(plan, ops=stopped), single_queue, stopped=True).run()


def prove_single_queue(plan: Plan) -> None:
    """The proof for a GPU with the one hardware queue that Megatron asks for.

    Raises:
        PlanError: the ranks would block each other; with what to do about it.
    """
    try:
        prove(plan, single_queue=True)
    except PlanError as error:
        raise PlanError(
            f"schedule {plan.schedule.name!r} needs several hardware queues a GPU, CUDA_DEVICE_MAX_CONNECTIONS is 1; "
            f"set it to 8, or choose another schedule. {error}"
        ) from error


class _Proof:
    """One run.

    Args:
        stopped: the ranks end before their last pass, and send what they have not computed, for nothing.
    """

    def __init__(self, plan: Plan, single_queue: bool, stopped: bool = False) -> None:
        self.plan = plan
        self.single_queue = single_queue
        self.stopped = stopped
        self.position = [0] * len(plan.ops)
        self.stage_to_rank = plan.schedule.placement.stage_to_rank
        self.sent: dict[tuple[int, int], list[Message]] = defaultdict(list)
        self.posted: dict[tuple[int, int], list[Message]] = defaultdict(list)
        self.open: set[Message] = set()
        self.expected: set[Message] = set()
        self.arrived: set[Message] = set()
        self.done: set[Pass] = set()
        self.peers: list[set[int]] = [set() for _ in plan.ops]
        for rank, ops in enumerate(plan.ops):
            for op in ops:
                if isinstance(op, (Send, Recv)):
                    self.peers[rank] |= {op.message.source, op.message.target} - {rank}

    def run(self) -> None:
        execute: dict[type, Callable[[int, Any], bool]] = {
            Compute: self._compute,
            Send: self._send,
            Recv: self._recv,
            Settle: self._settle,
            Validate: lambda _rank, _op: True,  # the iteration before has ended by itself
        }
        ready = deque(range(len(self.plan.ops)))
        while ready:
            rank = ready.popleft()
            ops = self.plan.ops[rank]
            started = position = self.position[rank]
            while position < len(ops) and execute[type(ops[position])](rank, ops[position]):
                self.position[rank] = position = position + 1
            if position > started:
                ready.extend(peer for peer in self.peers[rank] if peer not in ready)
        if any(position < len(ops) for position, ops in zip(self.position, self.plan.ops, strict=True)):
            raise self._error("the ranks wait for each other")
        self._check_ends()

    # Each of these executes an op, unless it must wait for what other ranks have not done yet; then it returns False.

    def _compute(self, rank: int, op: Compute) -> bool:
        for needed in self.plan.schedule.dependencies(op.work):
            source = self.stage_to_rank[needed.stage]
            if source == rank:
                if needed not in self.done:
                    raise self._error(f"pass {needed} is used before it is computed", rank)
                continue
            message = Message(needed, source, rank)
            if message not in self.expected:
                raise self._error(f"the output of {needed} is used but no receive was posted for it", rank)
            if message not in self.open and message not in self.arrived:
                return False
        if op.work in self.done:
            raise self._error(f"pass {op.work} runs twice", rank)
        self.done.add(op.work)
        return True

    def _send(self, rank: int, op: Send) -> bool:
        message = op.message
        mine, other = self.sent[message.channel], self.posted[message.channel]
        if self.single_queue and len(other) < len(mine):
            return False
        if message.source != rank or not (message.producer in self.done or self.stopped):
            raise self._error(f"{op} sends what rank {rank} has not computed", rank)
        self.open.add(message)
        self._match(rank, message, mine, other)
        return True

    def _recv(self, rank: int, op: Recv) -> bool:
        message = op.message
        mine, other = self.posted[message.channel], self.sent[message.channel]
        if self.single_queue and len(other) < len(mine):
            return False
        if message.target != rank:
            raise self._error(f"{op} receives a message of another rank", rank)
        self.expected.add(message)
        self._match(rank, message, mine, other)
        return True

    def _settle(self, rank: int, op: Settle) -> bool:
        message = op.message
        if message not in self.expected:
            return False
        if message not in self.open:
            raise self._error(f"{op} settles what was not sent, or twice", rank)
        self.open.remove(message)
        self.arrived.add(message)
        return True

    def _match(self, rank: int, message: Message, mine: list[Message], other: list[Message]) -> None:
        """The n-th send of a channel must be its n-th receive."""
        mine.append(message)
        if len(other) >= len(mine) and other[len(mine) - 1] != message:
            raise self._error(
                f"message {len(mine) - 1} of channel {message.source}>{message.target} is {message.producer} on one "
                f"end and {other[len(mine) - 1].producer} on the other",
                rank,
            )

    def _check_ends(self) -> None:
        missing = set(self.plan.schedule.passes()) - self.done
        if missing and not self.stopped:
            raise self._error(f"{len(missing)} passes are never computed, {min(map(str, missing))} among them")
        if self.open:
            raise self._error(f"the send of {next(iter(self.open)).producer} is never settled")
        for channel, messages in self.posted.items():
            if len(messages) != len(self.sent[channel]):
                raise self._error(f"channel {channel[0]}>{channel[1]} posts a receive that nothing is sent to")

    def _error(self, what: str, rank: int | None = None) -> PlanError:
        lines = [f"plan for {self.plan.schedule.name!r} refused: {what}."]
        for row, (position, ops) in enumerate(zip(self.position, self.plan.ops, strict=True)):
            before = " ".join(map(str, ops[max(0, position - 6) : position]))
            after = " ".join(map(str, ops[position + 1 : position + 4]))
            here = f"[{ops[position]}]" if position < len(ops) else "(end)"
            mark = ">" if rank in (None, row) and position < len(ops) else " "
            lines.append(f"{mark} rank {row}: ... {before} {here} {after}")
        return PlanError("\n".join(lines))
