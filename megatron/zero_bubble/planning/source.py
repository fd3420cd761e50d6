"""The source of a job's schedules: a name, a file, or a search during the run."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron.zero_bubble.core import schedules
from megatron.zero_bubble.core.analysis.memory import peaks_in_order
from megatron.zero_bubble.core.analysis.score import within
from megatron.zero_bubble.core.costs import PassMemory
from megatron.zero_bubble.core.costs.units import parse_memory_limit
from megatron.zero_bubble.core.errors import Refusal, attempted
from megatron.zero_bubble.core.formats.costs import CostsFile
from megatron.zero_bubble.core.formats.plan import PlanFile
from megatron.zero_bubble.core.ir import Kind, Pass, Placement, Schedule
from megatron.zero_bubble.core.plan.offload import Move
from megatron.zero_bubble.core.schedules import build, recipe
from megatron.zero_bubble.core.search.placements import PlacementName, placements
from megatron.zero_bubble.core.search.recompute import with_recomputation
from megatron.zero_bubble.planning.cuts import cuts_of, cutting, search_equal
from megatron.zero_bubble.planning.experts import build_hiding
from megatron.zero_bubble.planning.feasibility import LESS_MEMORY, ONE_QUEUE, Feasibility
from megatron.zero_bubble.planning.setup import AUTO_LIMIT, DEFAULT_LIMIT, Cuts, Given, Named, Searched, Setup
from megatron.zero_bubble.planning.shard_search import UnitChoice, even_figures, with_best_units
from megatron.zero_bubble.planning.vocabulary import inserted_evenly

ZB_AUTO = schedules.ZB_AUTO
FIRST_SCHEDULE: dict[PlacementName, str] = {"linear": "zb-h1", "vee": "zb-v", "loop": "zb-interleaved"}
"""The schedule of whole sequences that ``zb-auto`` runs until its plan is ready, by placement; on others, it runs what
a short search finds for equal passes."""
STOCK_SCHEDULE: dict[PlacementName, str] = {"linear": "1f1b", "loop": "interleaved-1f1b"}
"""Megatron's own schedule of whole sequences, by placement."""
DEFAULT_CHUNKS: dict[PlacementName, int] = {"loop": 2, "wave": 4}
"""Stages per rank of a run where none are given, for placements that have a choice."""


@dataclass(frozen=True)
class ScheduleSource:
    """The schedules of a job for a known number of pipeline ranks; a schedule file is already read and validated.

    Attributes:
        setup: what all its schedules have: cuts of sequences, vocabulary parallelism, the all-to-all of experts beneath
            computation, and the content of the file.
        placement: placement of the stages, the same for every number of microbatches.
        make: returns the schedule for a number of microbatches. For a file, it returns the file's schedule whatever
            the number; for ``zb-auto``, the schedule that runs before the planned one.
    """

    setup: Setup
    placement: Placement
    make: Callable[[int], Schedule]

    @property
    def name(self) -> str:
        """The name of the schedule, or the path of its file."""
        return self.setup.name

    @property
    def moves(self) -> tuple[Move, ...]:
        """What moves to host memory between forward and backward by the schedule file."""
        return () if self.setup.plan is None else self.setup.plan.added.moves

    @property
    def overlaps(self) -> bool:
        """Whether the all-to-all of experts runs beneath computation."""
        return self.setup.overlaps

    @classmethod
    def of(cls, setup: Setup, num_ranks: int, costs: CostsFile | None = None, fused: bool = False) -> ScheduleSource:
        """The schedules of a setup; those of a file ignore ``num_ranks`` and have their own.

        Args:
            costs: the content of the costs file by which the units of a named schedule are chosen, if it has one.
            fused: for a search, see ``_begun_with``.

        Raises:
            UserError: an unknown name, or a number of stages or slices that the schedule or placement does not support.
                ``make`` raises it for a memory limit below the peak of all sizes of units.
        """
        order = setup.order
        if isinstance(order, Given):
            assert order.plan is not None, "the file has been read"
            return cls.of_plan(order.file, order.plan)
        assert order is not None, "Megatron's own schedule has no source"
        if isinstance(order, Searched):
            own = _begun_with(setup, order, num_ranks, fused)
        else:
            own = _named(setup, order, num_ranks, costs)
        return replace(own, make=_recomputing(own.make)) if setup.early_recompute else own

    @classmethod
    def of_plan(cls, path: str, plan: PlanFile) -> ScheduleSource:
        """The schedule of a plan that was read from ``path``, and what it moves."""
        setup = replace(Setup.of(plan.schedule), order=Given(path, plan))
        return cls(setup, plan.schedule.placement, lambda _: plan.schedule)


def _named(setup: Setup, order: Named, num_ranks: int, costs: CostsFile | None) -> ScheduleSource:
    """The schedules of a name. Units are the best by the costs and the limit, which without either are the smallest
    that take no longer than one unit of all microbatches. Pairs hide the all-to-all of experts, or else the weight
    gradients of fused backwards do.
    """
    known = recipe(order.name)
    placement, cuts = known.placement(num_ranks, known.num_chunks(order.of_run)), cuts_of(setup.cuts, known)

    def build_units(num_microbatches: int, unit: int | None = setup.unit) -> Schedule:
        return cutting(build_hiding if setup.overlaps else build, setup.cuts)(
            known.name,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            num_chunks=order.of_run,
            unit_microbatches=unit if known.has_units else None,
        )

    make: Callable[[int], Schedule] = build_units
    if known.has_units and setup.unit is None:
        choice = UnitChoice.of(setup, order, costs)
        make = functools.cache(functools.partial(with_best_units, build_units, num_ranks, choice))
    return ScheduleSource(replace(setup, cuts=cuts), placement, _inserting(make, setup))


def _begun_with(setup: Setup, order: Searched, num_ranks: int, fused: bool) -> ScheduleSource:
    """The placement of ``zb-auto``, and the schedules that run while it measures, before the planned ones.

    With ``fused``, these split only the backward of the last microbatch, from which W can be measured: for jobs in
    which W needs much memory, such as those with full recomputation. With ``keep_faster``, they are Megatron's own, of
    which only that backward is split, wherever it has one: to compare the plan with it. Without vocabulary
    parallelism, a schedule above a limit in units of 1F1B's peak is replaced by what a short search finds within it,
    if anything, for equal passes; a limit in bytes says nothing before memory has been measured.

    Whatever the GPUs of the run, its first schedule is proved for one hardware queue: one that needs more is replaced
    by what a short search finds within less memory. With vocabulary parallelism it is as it is.
    """
    placement = order.of_run
    assert order.stages != "auto", "a run has a number of stages"
    (on,) = placements(placement, num_ranks, order.stages or DEFAULT_CHUNKS.get(placement))
    cuts, algorithm = cuts_of(setup.cuts), setup.algorithm
    is_whole = cuts.are_whole
    chunks = on.num_stages // num_ranks if placement in DEFAULT_CHUNKS else None
    make: Callable[[int], Schedule]
    if order.keep_faster and is_whole and algorithm is None and placement in STOCK_SCHEDULE:
        own = ScheduleSource.of(Setup(Named(STOCK_SCHEDULE[placement], chunks)), num_ranks)
        make = functools.cache(lambda count: split_last(own.make(count)))
    elif is_whole and placement in FIRST_SCHEDULE:
        make = _inserting(ScheduleSource.of(Setup(Named(FIRST_SCHEDULE[placement], chunks)), num_ranks).make, setup)
    elif not is_whole and placement == "linear":
        make = ScheduleSource.of(Setup(Named("seq-zb-h1"), cuts=setup.cuts), num_ranks).make
    else:
        make = _inserting(functools.cache(functools.partial(search_equal, on, cuts)), setup)
    if algorithm is not None:
        whole = make
        make = functools.cache(lambda count: fused_but_last(whole(count))) if fused else make
    else:
        make = functools.partial(_within, order.limit or DEFAULT_LIMIT, cuts, make)
        runs = Feasibility(ONE_QUEUE, setup.messages.receives)
        make = functools.cache(functools.partial(_that_runs, runs, cuts, fused, make))
    return ScheduleSource(replace(setup, cuts=cuts), on, make)


def _inserting(make: Callable[[int], Schedule], setup: Setup) -> Callable[[int], Schedule]:
    """What makes the schedules with the passes that the setup inserts."""
    if (algorithm := setup.algorithm) is None:
        return make
    return functools.cache(lambda count: inserted_evenly(make(count), algorithm))


def _recomputing(make: Callable[[int], Schedule]) -> Callable[[int], Schedule]:
    """What makes the schedules with an R before every backward; one of a stage without layers has nothing to do."""
    return functools.cache(lambda count: with_recomputation(make(count)))


def fused_but_last(schedule: Schedule) -> Schedule:
    """Fuse all backwards but those of the last microbatch, in the place of their B; the other passes stay."""
    last = schedule.num_microbatches - 1
    order = tuple(
        tuple(
            p._replace(kind=Kind.BW) if p.kind is Kind.B and p.microbatch < last else p
            for p in row
            if p.kind is not Kind.W or p.microbatch == last
        )
        for row in schedule.order
    )
    return replace(schedule, name=f"{schedule.name}, all backwards but the last fused", order=order)


def split_last(schedule: Schedule) -> Schedule:
    """Split the fused backwards of the last microbatch into B and W, in their place; the other passes stay."""

    def parts(work: Pass) -> tuple[Pass, ...]:
        if work.kind is not Kind.BW or work.microbatch < schedule.num_microbatches - 1:
            return (work,)
        return work._replace(kind=Kind.B), work._replace(kind=Kind.W)

    order = tuple(tuple(part for work in row for part in parts(work)) for row in schedule.order)
    return replace(schedule, order=order)


def _within(limit: str, cuts: Cuts, make: Callable[[int], Schedule], num_microbatches: int) -> Schedule:
    """What ``make`` returns, unless its peak is above the limit, by equal microbatches, and a search finds another."""
    schedule = make(num_microbatches)
    if limit in (DEFAULT_LIMIT, AUTO_LIMIT) or parse_memory_limit(limit)[1] != "p":
        return schedule
    on = schedule.placement
    most = even_figures(on.num_ranks, num_microbatches).limit(limit)
    if within(max(peaks_in_order(schedule, PassMemory.uniform(on))), most):
        return schedule
    shorter = attempted(functools.partial(search_equal, on, cuts, num_microbatches, most))
    return schedule if isinstance(shorter, Refusal) else shorter  # not even one microbatch fits


def _that_runs(
    runs: Feasibility, cuts: Cuts, fused: bool, make: Callable[[int], Schedule], num_microbatches: int
) -> Schedule:
    """What ``make`` returns, or what a search finds within less and less memory, the first that runs; the former if
    none does, so that its refusal says why.
    """
    first, limit = make(num_microbatches), math.inf
    found = first
    while runs.refusal(own := fused_but_last(found) if fused else found) is not None:
        limit = LESS_MEMORY * min(limit, max(peaks_in_order(found, PassMemory.uniform(found.placement))))
        less = attempted(functools.partial(search_equal, found.placement, cuts, num_microbatches, limit))
        if isinstance(less, Refusal):
            return fused_but_last(first) if fused else first
        found = less
    return own


SourceOnRanks = Callable[[int], ScheduleSource]
"""Maps a number of pipeline ranks to the source; used where that number is not known yet."""
