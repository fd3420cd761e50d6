"""Collectives between all ranks of a pipeline, concurrent with the passes: one lane and one process group per kind.

The collectives of a kind run in the same order on all ranks, which the proof of the plan checks. Kinds do not wait for
each other, so ranks may start collectives of different kinds in different orders.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron.zero_bubble.core.errors import PeerError
from megatron.zero_bubble.core.ir import Kind, Op, Plan, Value
from megatron.zero_bubble.core.ir.collectives import AllGather, Collective, Finish, Spread, Sum
from megatron.zero_bubble.engine.platforms.streams import Lane, Result
from megatron.zero_bubble.engine.runtime.groups import destroy, group_beside_passes, join, torchs
from megatron.zero_bubble.engine.runtime.handler import Awaited, Handler
from megatron.zero_bubble.engine.runtime.observer import IterationObserver, observed_work
from megatron.zero_bubble.engine.runtime.transport import blaming_peers
from megatron.zero_bubble.engine.runtime.watchdog import Watchdog

_PATIENCE_S = 10.0
"""Time that the collectives of all lanes have to complete when they are closed. Ranks close them after the same
iteration, so only a lost rank takes longer."""
_LEAST_S = 0.1
"""Time that each lane has in any case, to end when it has nothing to run."""


@dataclass(frozen=True)
class Transfer:
    """One transfer between all ranks, in memory that belongs to the passes.

    With few hardware queues, what a lane runs behind a transfer would hold back the passes until that has ended. So
    everything that follows is computed when the passes wait.

    Attributes:
        run: takes part, on a lane: a single collective of torch.distributed is the last thing that it starts. It may
            wait for other ranks, and records no gradient.
        uses: the tensors that ``run`` reads or writes.
        result: makes the result, with the passes, when the transfer has ended.
    """

    run: Callable[[dist.ProcessGroup], object]
    uses: tuple[torch.Tensor, ...] = ()
    result: Callable[[], Any] = lambda: None


class Transfers(Protocol):
    """The transfers of a model's values. Its methods allocate memory; they do not wait, and record no gradient.

    ``root`` is the rank within the group, which contains all pipeline ranks in order. A value or part may be
    ``executor.FORGOTTEN`` if the ranks have stopped; the rank then takes part with any tensors of the right shapes.
    """

    def spread(self, value: Value, held: Any, root: int) -> Transfer:
        """The value of the root is the result; ``held`` is the value on the root, and None on the other ranks."""

    def gather(self, kind: Kind, microbatch: int, part: Any) -> tuple[Transfer, Any]:
        """Also returns the part for ``total``, which then also has what the parts of all ranks are scaled by."""

    def total(self, kind: Kind, microbatch: int, part: Any, root: int, is_root: bool) -> Transfer:
        """The sum of the parts of all ranks is the result on the root, and None on the other ranks."""


class Lanes:
    """The lanes and process groups of one pipeline.

    Args:
        group: the ranks of the pipeline.
        make_lane: makes a lane.
        timeout, nccl_ctas: see ``groups.Directions.of``.
        watchdog: with NCCL, follows the waits of the GPU; None if the host waits.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        make_lane: Callable[[], Lane],
        timeout: timedelta | None,
        nccl_ctas: int | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        self._watchdog = watchdog
        self._make_group = partial(group_beside_passes, group, timeout, nccl_ctas)
        self._make_lane = make_lane
        self._lanes: dict[str, tuple[Lane, dist.ProcessGroup]] = {}

    def open(self, kinds: Iterable[str]) -> None:
        """Make the lanes that are missing, and join their groups in the same order on all ranks.

        A collective call of all ranks of the job, with the same kinds.
        """
        for kind in sorted(set(kinds) - self._lanes.keys()):
            self._lanes[kind] = self._make_lane(), self._make_group()

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The process groups of the lanes, in the same order on all ranks."""
        return tuple(group for _, (_, group) in sorted(self._lanes.items()))

    def rejoin(self) -> None:
        """Join all groups again, because the job has made them again within their wrappers."""
        for group in self.groups:
            join(group)

    def start(self, op: Collective, transfer: Transfer) -> Awaited:
        """Start the transfer of an op in the group of its kind.

        Raises:
            PeerError: an earlier collective of the kind failed, because another rank died or did not take part.
        """
        lane, group = self._lanes[op.lane]
        current = torchs(group)

        def run() -> None:
            with torch.no_grad():
                transfer.run(current)

        with blaming_peers(partial(_missed, op, op)):
            return CollectiveResult(lane.start(run, transfer.uses), op, transfer.result, self._watchdog)

    def close(self, timeout_s: float = _PATIENCE_S) -> None:
        """Stop the lanes, when all collectives are complete, and destroy their groups.

        If another rank failed or hangs, collectives may never be complete. After ``timeout_s`` seconds, their lanes and
        groups are left as they are.
        """
        deadline_s = time.monotonic() + timeout_s
        for lane, group in self._lanes.values():
            stopped = lane.close(max(_LEAST_S, deadline_s - time.monotonic()))
            if stopped:
                destroy(group)
        self._lanes.clear()


class CollectiveResult(Awaited):
    """The result of a collective, which ``make`` makes once the transfer has ended."""

    def __init__(
        self, ended: Result, op: Collective, make: Callable[[], Any], watchdog: Watchdog | None = None
    ) -> None:
        self._ended, self._op, self._make, self._watchdog = ended, op, make, watchdog

    def wait(self, needed_by: object) -> Any:
        """Wait for the result.

        Raises:
            PeerError: another rank died or did not take part within the group's timeout. With NCCL, the watchdog ends
                the process with the same message instead.
        """
        op = self._op  # the watchdog must not keep the result
        with blaming_peers(partial(_missed, op, needed_by)):
            if self._watchdog is None:
                self._ended.wait()
            else:
                self._watchdog.wait(self._ended, partial(_missed, op, needed_by))
        with torch.no_grad():
            return self._make()


def _missed(op: Collective, needed_by: object, reason: str) -> PeerError:
    return PeerError(
        f"pipeline rank {op.rank} could not run {needed_by}: not all ranks took part in the collective for "
        f"{op.key} ({reason}); a rank has failed or hangs: look for the first error of the other ranks"
    )


def collective_kinds(plan: Plan) -> set[str]:
    return {op.lane for row in plan.stem.ops for op in row if isinstance(op, Collective)}


def collective_handlers(
    plan: Plan, lanes: Lanes, transfers: Transfers, observer: IterationObserver | None = None
) -> Mapping[type[Op], Handler]:
    """The handlers of collectives for one iteration of ``plan``; ``observer`` is notified when they run."""
    flow = plan.schedule.flow

    def start(op: Collective, transfer: Transfer) -> Awaited:
        return lanes.start(op, replace(transfer, run=observed_work(op, transfer.run, observer)))

    @torch.no_grad()
    def spread(op: Spread, inputs: Sequence[Any]) -> Sequence[Any]:
        return (start(op, transfers.spread(op.value, inputs[0] if op.is_root else None, op.root)),)

    @torch.no_grad()
    def gather(op: AllGather, inputs: Sequence[Any]) -> Sequence[Any]:
        transfer, scaled = transfers.gather(op.value.producer.kind, op.value.producer.microbatch, inputs[0])
        start(op, transfer)  # the sum follows on the same lane, so nobody else has to wait
        return (scaled,)

    @torch.no_grad()
    def total(op: Sum, inputs: Sequence[Any]) -> Sequence[Any]:
        kind, microbatch = op.value.producer.kind, op.value.producer.microbatch
        result = start(op, transfers.total(kind, microbatch, inputs[0], op.root, op.is_root))
        # The sum is in place of the first part.
        return (result, *(None for _ in op.effects(flow).gives[1:]))

    def finish(_op: Finish, _inputs: Sequence[Any]) -> None:
        """The executor has waited for the collective, and drops what it has read."""

    return {Spread: spread, AllGather: gather, Sum: total, Finish: finish}
