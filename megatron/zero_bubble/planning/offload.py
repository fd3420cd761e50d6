"""Plan offloading: what moves to host memory for a choice of the user, within limits of device and host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.zero_bubble.core.analysis.memory import host_peaks, most_kept
from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.analysis.undelayed import undelayed
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.moves import OFFLOAD, moves_content
from megatron.zero_bubble.core.ir.garbage import without_gc
from megatron.zero_bubble.core.ir.passes import F
from megatron.zero_bubble.core.plan import NOTHING, Additions, plan_without_messages, prove
from megatron.zero_bubble.core.plan.offload import Move, parse_share
from megatron.zero_bubble.core.plan.select import Selection, pending_wgrads
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.part import Part

AUTO = "auto"
_TRIES = 6
"""How often the time that the copies may add is halved, or doubled, to meet a memory limit."""


@dataclass(frozen=True)
class HostLimits:
    """Limits of the host, in the unit of memory of the costs.

    Attributes:
        per_rank: host memory of a rank; None for no limit.
        per_node: host memory of the consecutive ranks of a node; None for no limit.
        ranks_per_node: pipeline ranks on a node.
        ranks_per_link: consecutive ranks that share a link to the host. Copies that are under way at a time divide its
            bandwidth, so each is planned to take as many times as long as alone: none ends later than that.
    """

    per_rank: float | None = None
    per_node: float | None = None
    ranks_per_node: int = 1
    ranks_per_link: int = 1

    def __post_init__(self) -> None:
        for name in ("ranks_per_node", "ranks_per_link"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be 1 or more; got {getattr(self, name)}; give the number of ranks")


NO_LIMITS = HostLimits()


@dataclass(frozen=True)
class OffloadPlan(Part):
    """The figures of a plan with offloading. Memory is in the unit of the costs.

    Attributes:
        timeline: that of the plan; its peaks are those of the device.
        choice: what was requested, as in ``plan_offload``.
        moves: what moves.
        share: share of the forwards that move, over all ranks, from 0 to 1.
        device_peak, host_peak: peak memory per rank.
        pending_wgrad: per rank, the most memory of operands that wait for W; no move reduces it.
        added_ms: what the copies add to the makespan.
    """

    timeline: Timeline
    choice: str
    moves: tuple[Move, ...]
    share: float
    device_peak: tuple[float, ...]
    host_peak: tuple[float, ...]
    pending_wgrad: tuple[float, ...]
    added_ms: float
    adds_ops = True

    def adding(self, added: Additions) -> Additions:
        """See ``Part``."""
        return replace(added, moves=self.moves)

    def content(self, costs: Figures) -> dict[str, Any]:
        """See ``Part``."""
        return {**self.figures, **moves_content(self.moves)}

    @property
    def figures(self) -> dict[str, Any]:
        """The figures of offloading, and for which choice they are, by key of the plan's JSON."""
        return {
            OFFLOAD: self.choice,
            "offloaded_share": self.share,
            "offload_added_ms": self.added_ms,
            "device_peak": self.device_peak,
            "host_peak": self.host_peak,
            "pending_wgrad": self.pending_wgrad,
        }


@without_gc()
def plan_offload(
    before: Timeline,
    costs: PassCosts,
    memory: PassMemory,
    choice: str = AUTO,
    limit: float | None = None,
    host: HostLimits = NO_LIMITS,
    added: Additions = NOTHING,
) -> OffloadPlan:
    """Plan what moves, prove the result without messages, and simulate it.

    Args:
        before: the plan without offloading.
        choice: ``auto`` for the least peak that delays nothing, or with ``limit``, for the shortest plan within it;
            ``all`` and ``N%`` for the least peak with at most this share of the forwards, also if that delays passes; a
            larger share raises the peak of no rank; ``none``.
        limit: device memory per rank. Ranks move no more than they need to.
        added: what the plan has already.

    Raises:
        UserError: for another choice, or if ``costs`` lack the time of copies.
    """
    share = 1.0 if choice == AUTO else parse_share(choice)
    if share:
        check_copies(costs, choice)
    costs = replace(costs, host_ms=tuple(ms * host.ranks_per_link for ms in costs.host_ms))
    moves = _moves(before, costs, memory, choice, share, limit, host)
    return _finished(choice, replace(added, moves=moves), before, costs, memory)


def check_copies(costs: PassCosts, choice: str) -> None:
    """Raise ``UserError`` unless the costs have the time of copies, which ``choice`` needs."""
    if not any(costs.host_ms):
        raise UserError(
            f"offloading needs the time of a copy to host memory; got none with offload {choice}; give --host-ms or "
            "--host-bandwidth, or host_ms in the costs file"
        )


def _moves(
    before: Timeline,
    costs: PassCosts,
    memory: PassMemory,
    choice: str,
    share: float,
    limit: float | None,
    host: HostLimits,
) -> tuple[Move, ...]:
    if not share:
        return ()
    room = None if host.per_rank is None else (host.per_rank,) * len(before.spans)
    selection, most = Selection(before, costs, memory), limit if choice == AUTO else None
    slower = 1.0 if choice == AUTO else None
    if most is not None:
        slower = _least_slowdown(lambda slower: selection.meets(most, room, slower))
    moves = selection.moves(share, most, room, slower)
    if host.per_node is not None:
        wanted = moves if share == 1 else selection.moves(1.0, most, room, slower)
        plan = plan_without_messages(before.schedule, Additions(moves=wanted))
        room = _shared(host_peaks(plan, memory), host, room)
        moves = selection.moves(share, most, room, slower)
    return moves


def _least_slowdown(fits: Callable[[float], bool]) -> float:
    """Return the smallest factor found by which passes must be slower to meet the limit; 1 if none is found."""
    low = high = 1.0
    if fits(low):
        return low
    for _ in range(_TRIES):
        high *= 2
        if fits(high):
            break
    else:
        return 1.0
    low = high / 2
    for _ in range(_TRIES):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _shared(wanted: Sequence[float], host: HostLimits, room: Sequence[float] | None) -> tuple[float, ...]:
    """Divide the memory of every node among its ranks in the ratio of ``wanted``, which they would use without the
    limit.
    """
    assert host.per_node is not None
    shares: list[float] = []
    for first in range(0, len(wanted), host.ranks_per_node):
        of_node = wanted[first : first + host.ranks_per_node]
        total = sum(of_node)
        part = 1.0 if total <= host.per_node else host.per_node / total
        shares += [peak * part for peak in of_node]
    return tuple(shares) if room is None else tuple(map(min, shares, room))


def _finished(choice: str, added: Additions, before: Timeline, costs: PassCosts, memory: PassMemory) -> OffloadPlan:
    schedule, moves = before.schedule, added.moves
    plan = plan_without_messages(schedule, added)
    timeline = undelayed(before, plan, costs, memory)
    if timeline is None:
        prove(plan)
        timeline = simulate(plan, costs, memory) if moves else before
    forwards = sum(p.kind is F for p in schedule.passes())
    return OffloadPlan(
        timeline,
        choice,
        moves,
        len(moves) / forwards,
        most_kept(timeline, memory),
        host_peaks(plan, memory),
        pending_wgrads(timeline, memory),
        timeline.makespan_ms - before.makespan_ms,
    )
