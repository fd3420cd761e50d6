"""Collectives between all ranks of a pipeline, concurrent with the passes: one lane and one process group per kind.

The collectives of a kind run in the same order on all ranks, which the proof of the plan checks. Kinds do not wait for
each other, so ranks may start collectives of different kinds in different orders.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron.zero_bubble.errors import PeerError
from megatron.zero_bubble.ir import Kind, Op, Plan, Value
from megatron.zero_bubble.ir.collectives import Collective, Finish, Spread, Sum
from megatron.zero_bubble.platforms.streams import Lane, Result
from megatron.zero_bubble.runtime.groups import destroy, group_beside_passes, join, torchs
from megatron.zero_bubble.runtime.handler import Awaited, Handler
from megatron.zero_bubble.runtime.observer import IterationObserver, observed_work
from megatron.zero_bubble.runtime.transport import lost_connection
from megatron.zero_bubble.runtime.watchdog import Watchdog

_PATIENCE_S = 10.0
"""Time that the collectives of all lanes have to complete when they are closed. Ranks close them after the same
iteration, so only a lost rank takes longer."""
_LEAST_S = 0.1
"""Time that each lane has in any case, to end when it has nothing to run."""


class Transfers(Protocol):
    """The collectives of a model's values. Its methods run on a lane, may wait for other ranks, and record no gradient.

    ``root`` is the rank within ``group``, which contains all pipeline ranks in order. A value or part may be
    ``executor.FORGOTTEN`` if the ranks have stopped; the rank then takes part with any tensors of the right shapes.
    """

    def spread(self, value: Value, held: Any, root: int, group: dist.ProcessGroup) -> Any:
        """Return the value of the root; ``held`` is the value on the root, and None on the other ranks."""

    def total(self, kind: Kind, microbatch: int, part: Any, root: int, group: dist.ProcessGroup) -> Any:
        """Return the sum of the parts of all ranks on the root, and None on the other ranks."""


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

    def start(self, op: Collective, work: Callable[[dist.ProcessGroup], Any], uses: Iterable[torch.Tensor]) -> Awaited:
        """Start ``work`` of an op, which gets the group of its kind.

        Raises:
            PeerError: an earlier collective of the kind failed, because another rank died or did not take part.
        """
        lane, group = self._lanes[op.lane]
        current = torchs(group)

        def run() -> Any:
            with torch.no_grad():
                return work(current)

        with _blaming_peers(op, op):
            return CollectiveResult(lane.start(run, uses), op, self._watchdog)

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
    """The result of a collective."""

    def __init__(self, result: Result, op: Collective, watchdog: Watchdog | None = None) -> None:
        self._result, self._op, self._watchdog = result, op, watchdog

    def wait(self, needed_by: object) -> Any:
        """Wait for the result.

        Raises:
            PeerError: another rank died or did not take part within the group's timeout. With NCCL, the watchdog ends
                the process with the same message instead.
        """
        op = self._op  # the watchdog must not keep the result
        with _blaming_peers(op, needed_by):
            if self._watchdog is None:
                return self._result.wait()
            return self._watchdog.wait(self._result, lambda reason: _missed(op, needed_by, reason))


@contextmanager
def _blaming_peers(op: Collective, needed_by: object) -> Iterator[None]:
    """Context that turns a lost connection into a PeerError."""
    try:
        yield
    except RuntimeError as error:
        if (reason := lost_connection(error)) is None:
            raise
        raise _missed(op, needed_by, reason) from error


def _missed(op: Collective, needed_by: object, reason: str) -> PeerError:
    return PeerError(
        f"pipeline rank {op.rank} could not run {needed_by}: not all ranks took part in the collective for "
        f"{op.key} ({reason}); a rank has failed or hangs: look for the first error of the other ranks"
    )


def collective_kinds(plan: Plan) -> set[str]:
    """The kinds of collectives in ``plan``, one lane for each."""
    return {op.lane for row in plan.stem.ops for op in row if isinstance(op, Collective)}


def collective_handlers(
    plan: Plan, lanes: Lanes, transfers: Transfers, observer: IterationObserver | None = None
) -> Mapping[type[Op], Handler]:
    """The handlers of collectives for one iteration of ``plan``; ``observer`` is notified when they run."""
    flow = plan.schedule.flow

    def start(op: Collective, work: Callable[[dist.ProcessGroup], Any], uses: Any) -> Awaited:
        return lanes.start(op, observed_work(op, work, observer), tensors_of(uses))

    def spread(op: Spread, inputs: Sequence[Any]) -> Sequence[Any]:
        held = inputs[0] if op.is_root else None

        def give(group: dist.ProcessGroup) -> None:
            transfers.spread(op.value, held, op.root, group)  # the root has the value already

        if op.is_root:
            return (start(op, give, held),)
        return (start(op, lambda group: transfers.spread(op.value, None, op.root, group), None),)

    def total(op: Sum, inputs: Sequence[Any]) -> Sequence[Any]:
        (part,) = inputs
        kind, microbatch = op.value.producer.kind, op.value.producer.microbatch
        result = start(op, lambda group: transfers.total(kind, microbatch, part, op.root, group), part)
        # The sum is in place of the first part.
        return (result, *(None for _ in op.effects(flow).gives[1:]))

    def finish(_op: Finish, _inputs: Sequence[Any]) -> None:
        """The executor has waited for the collective, and drops what it has read."""

    return {Spread: spread, Sum: total, Finish: finish}


def tensors_of(value: Any) -> tuple[torch.Tensor, ...]:
    """The tensors in a value: a tensor, or a tuple that may also have other items."""
    items = value if isinstance(value, tuple) else (value,)
    return tuple(item for item in items if isinstance(item, torch.Tensor))
