"""Insert the ops that move what forwards saved to host memory and back (PipeOffload, arXiv 2503.01328, section 3).

Two steps, with ``Move`` between them: a selection decides which forwards move and how many passes each copy overlaps;
the lowering pass ``offload`` places the ops accordingly, and decides nothing. ``select_longest`` is a simple selection,
which needs no costs; ``plan.copies`` plans the copies so that they delay no pass.

Fewer passes during a copy mean less memory, because both copies of it exist meanwhile, and more waiting if the copy
takes longer than the passes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from megatron.zero_bubble.core.analysis.memory import host_peaks
from megatron.zero_bubble.core.analysis.score import within
from megatron.zero_bubble.core.costs import PassMemory
from megatron.zero_bubble.core.errors import PlanError, UserError
from megatron.zero_bubble.core.ir import Op, Pass, Plan, Schedule, Validate
from megatron.zero_bubble.core.ir.offload import Discard, Evict, Fetch, Reclaim, ReleaseDevice
from megatron.zero_bubble.core.ir.passes import BW, B, F

_Item = TypeVar("_Item")
NO_SHARE = "none"


class Move(NamedTuple):
    """What ``forward`` saved leaves the device.

    Attributes:
        out: number of passes between the start of the copy to the host and the wait for it.
        back: number of passes between the start of the copy back and the backward.
        after: number of passes between the forward and the start of the copy to the host.
    """

    forward: Pass
    out: int = 1
    back: int = 1
    after: int = 0

    def places(self, span: Lifespan) -> Places:
        """The places of its ops, for the positions of its forward and backward."""
        evict = span.begin + self.after + 1
        return Places(evict, evict + self.out, span.end - self.back)


class Places(NamedTuple):
    """The places of the ops of a move among the passes of its rank: the number of passes before each."""

    evict: int
    release: int
    fetch: int


MoveSelection = Callable[[Schedule], Collection[Move]]
"""Selects what moves in a schedule; the same on all ranks."""


class Lifespan(NamedTuple):
    """The positions of a forward and of its backward among the passes of their rank."""

    forward: Pass
    begin: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.begin

    def can_move(self, out: int = 1, back: int = 1) -> bool:
        """Whether at least one pass runs while the values are on the host only. If not, moving them frees nothing."""
        return self.length > out + back + 1


def lifespans(row: Sequence[Pass]) -> list[Lifespan]:
    """The lifespans of all forwards with a backward among the passes of one rank, in the order of the forwards."""
    ends = {(p.stage, p.microbatch, p.slice): place for place, p in enumerate(row) if p.kind in (B, BW)}
    keys = ((p, place, (p.stage, p.microbatch, p.slice)) for place, p in enumerate(row) if p.kind is F)
    return [Lifespan(p, place, ends[key]) for p, place, key in keys if key in ends]


def select_longest(
    schedule: Schedule, share: float, out: int | None = None, back: int | None = None
) -> tuple[Move, ...]:
    """Select ``share`` of the forwards of each rank, longest lifespan first.

    Stages are taken as a whole, in the order of their mean lifespan (arXiv 2503.01328, section 4), and the forwards of
    the last one at even distances: neighbours are on the device at the same time, so each should have some that move.
    Forwards whose backward follows too closely stay. A larger share adds moves and removes none, so no rank needs more
    device memory at any time.

    Args:
        share: from 0 to 1; of all forwards of the rank, those that have to stay included.
        out, back: see ``Move``; by default, as many as one op takes: passes of a pair run between the same two places.
    """
    of_pairs, of_passes = (3, 2), (1, 1)
    least_out, least_back = of_pairs if schedule.pairs else of_passes
    out, back = least_out if out is None else out, least_back if back is None else back
    moves: list[Move] = []
    for row in schedule.order:
        by_stage: defaultdict[int, list[Lifespan]] = defaultdict(list)
        for lifespan in lifespans(row):
            by_stage[lifespan.forward.stage].append(lifespan)
        left = round(share * sum(map(len, by_stage.values())))
        for spans in sorted(by_stage.values(), key=_mean_length, reverse=True):
            movable = [lifespan.forward for lifespan in spans if lifespan.can_move(out, back)]
            chosen = set(spread(movable)[:left])
            moves += [Move(forward, out, back) for forward in movable if forward in chosen]
            left -= len(chosen)
    return tuple(moves)


def _mean_length(spans: Sequence[Lifespan]) -> float:
    return sum(span.length for span in spans) / len(spans)


def spread(items: Sequence[_Item]) -> list[_Item]:
    """Order the items so that the first of them, however many, are at about even distances: every second one first."""
    return [*spread(items[1::2]), *spread(items[::2])] if len(items) > 1 else list(items)


def offload(plan: Plan, moves: Collection[Move]) -> Plan:
    """A lowering pass: add the ops of ``moves``, also to the drain of a plan that validates optimizer steps.

    Args:
        moves: at most one per forward.
    """
    if not moves:
        return plan
    by_forward = {move.forward: move for move in moves}
    assert len(by_forward) == len(moves), "a forward moves at most once"
    plan = replace(plan, ops=tuple(tuple(_row(row, by_forward)) for row in plan.ops))
    if plan.drain:
        rows = zip(plan.ops, plan.drain, strict=True)
        plan = replace(plan, drain=tuple((*drain, *_discards(row)) for row, drain in rows))
    return plan


def _row(row: Sequence[Op], moves: dict[Pass, Move]) -> Iterator[Op]:
    passes = [work for op in row for work in op.works]
    behind: defaultdict[int, list[Op]] = defaultdict(list)  # by the number of passes before
    before: defaultdict[int, list[Op]] = defaultdict(list)
    own = [(span, moves[span.forward].places(span)) for span in lifespans(passes) if span.forward in moves]
    for span, places in sorted(own, key=lambda each: each[1].release):
        behind[places.evict].append(Evict(span.forward))
        before[places.release].append(ReleaseDevice(span.forward))
    # After the releases, because what is freed can be allocated again; what is needed first is copied first.
    for span, places in sorted(own, key=lambda each: each[0].end):
        before[places.fetch].append(Fetch(span.forward))
    # Directly before the backward, behind the copies back that start there.
    for span, _ in own:
        before[span.end].append(Reclaim(span.forward))
    place = 0
    for op in row:
        end = place + len(op.works)
        for number in range(place, end):
            yield from before[number]
        yield op
        for number in range(place, end):
            yield from behind[number + 1]
        place = end


def _discards(row: Sequence[Op]) -> Iterator[Op]:
    """The ops that free what is on the host if the rank stops at its ``Validate``."""
    begun = row[: row.index(Validate())]
    kinds = Evict, ReleaseDevice, Fetch, Reclaim
    evicted, released, fetched, reclaimed = ([op.forward for op in begun if isinstance(op, kind)] for kind in kinds)
    for forward in evicted:
        if forward in fetched:
            yield from () if forward in reclaimed else (Reclaim(forward),)
        else:
            yield from () if forward in released else (ReleaseDevice(forward),)
            yield Discard(forward)


def check_host_memory(plan: Plan, memory: PassMemory, limit: float) -> None:
    """Check that no rank has more than ``limit`` in host memory, in the unit of ``memory``.

    Raises:
        PlanError: with the rank and its peak.
    """
    for rank, peak in enumerate(host_peaks(plan, memory)):
        if not within(peak, limit):
            raise PlanError(
                f"plan for {plan.schedule.name!r} refused: rank {rank} would have {peak:g} in host memory, and the "
                f"limit is {limit:g}; raise the limit, or offload a smaller share"
            )


def parse_share(text: str) -> float:
    """Parse ``all``, ``none`` or a percentage such as ``50%`` into a share from 0 to 1.

    Raises:
        UserError: for any other form, or more than 100%.
    """
    match = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)%", text)
    share = {"all": 1.0, NO_SHARE: 0.0}.get(text, float(match[1]) / 100 if match else -1.0)
    if not 0 <= share <= 1:
        raise UserError(f"the share to offload is all, none or a percentage up to 100%, for example 50%; got {text!r}")
    return share
