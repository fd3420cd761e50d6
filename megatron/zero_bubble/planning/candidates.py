"""The schedules that ``zero-bubble compare`` compares: one question per row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from megatron.zero_bubble.core.analysis.bounds import least_memory
from megatron.zero_bubble.core.analysis.score import Goal, within
from megatron.zero_bubble.core.analysis.timeline import Metric, Timeline
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import WHOLE, Placement, Slices
from megatron.zero_bubble.core.ir.sizes import check_size
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.schedules import SCHEDULES
from megatron.zero_bubble.core.schedules.recipe import Recipe
from megatron.zero_bubble.core.search.placements import HAS_CHUNKS, label_of, name_of
from megatron.zero_bubble.planning.choosers import MOST_CHUNKS
from megatron.zero_bubble.planning.cuts import with_candidates
from megatron.zero_bubble.planning.experts import WITH_OVERLAP, WITH_PAIRS
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.plans import bound
from megatron.zero_bubble.planning.question import Offloading, Question
from megatron.zero_bubble.planning.recompute import WITH_R
from megatron.zero_bubble.planning.score import DroppedVariant, attempt
from megatron.zero_bubble.planning.setup import BY_COST, Cuts, Named, Searched, Setup, Shards
from megatron.zero_bubble.planning.shards import Replicas
from megatron.zero_bubble.planning.source import ZB_AUTO
from megatron.zero_bubble.planning.vocabulary import Variant, variants_of

FITTED = "fitted"
"""Suffix for the name of a schedule for equal passes that was refitted to the costs."""
SHARDED = "sharded"
"""Suffix for the name of a schedule whose weights are sharded."""
_TENSOR = ("1f1b", "zb-h1", "zb-v")
"""Schedules that are also listed with tensor parallelism: Megatron's, and the best for one or two stages per rank."""
_OVERLAPPED = ("zb-h1", "zb-v")
"""Schedules without pairs that are also listed with the all-to-all of experts beneath weight gradients."""
LAID_OUT = "layout by cost"
"""Suffix for the name of a schedule whose layers per stage were chosen together with it."""
_MOST_TRIED = 64
"""Most stages per rank to try: every number up to it has a row per interleaved schedule."""


def most_chunks(asked: int | None, costs: Figures) -> int:
    """Return the most stages per rank of interleaved schedules; ``asked`` is the user's choice, if any.

    Raises:
        UserError: for a number below 1, or so large that the table would take hours.
    """
    if asked is None:
        return min(costs.most_layers or MOST_CHUNKS, MOST_CHUNKS)
    if not 1 <= asked <= _MOST_TRIED:
        raise UserError(
            f"--max-chunks must be from 1 (no interleaved schedules) to {_MOST_TRIED}; got {asked}; "
            "`zero-bubble plan --num-chunks` plans one schedule of any number"
        )
    check_size(costs.num_ranks, costs.num_microbatches, asked)
    return asked


class Candidate(NamedTuple):
    """One row.

    Attributes:
        name: for messages.
        title: the name of the schedule in the table; ``{}`` stands for the number of slices.
        tensor_parallel: how many GPUs divide a layer instead of replicas; None if layers are whole.
        tensor_bytes: what a rank sends to them per iteration.
    """

    name: str
    title: str
    question: Question
    tensor_parallel: int | None = None
    tensor_bytes: float | None = None

    def titled(self, timeline: Timeline) -> Timeline:
        """The timeline, with the name that the schedule has in the table."""
        schedule = timeline.schedule
        return replace(timeline, schedule=replace(schedule, name=self.title.format(schedule.num_slices)))


def comparable(
    candidates: Iterable[Candidate | DroppedVariant], everything: bool
) -> tuple[list[Candidate | DroppedVariant], list[str]]:
    """Leave out the schedules that are only for comparison, unless ``everything`` is asked for, and say which.

    With pairs, they hide the all-to-all of experts as no other does, and stay.
    """
    kept, names = [], []
    for each in candidates:
        known = None if isinstance(each, DroppedVariant) else SCHEDULES.get(str(each.question.schedule))
        pairs = not isinstance(each, DroppedVariant) and each.question.setup.pairs
        if known is None or everything or not known.only_compared or pairs:
            kept.append(each)
        else:
            names.append(known.name)
    return kept, [f"{name}: only for comparison; --all lists it" for name in dict.fromkeys(names)]


class Bounds(NamedTuple):
    """Lower bounds in ms, by placement.

    Attributes:
        key: in JSON.
        of: which schedules they are for, in words after "schedule"; "" for those of whole sequences.
    """

    key: str
    of: str
    ms: dict[str, float]


class _Way(NamedTuple):
    """How to make one schedule."""

    name: str
    title: str
    question: Question

    def row(self, suffix: str = "", **decisions: Any) -> Candidate:
        """The row with other decisions too."""
        return Candidate(self.name + suffix, self.title + suffix, self.question.deciding(**decisions))


@dataclass(frozen=True)
class Comparison:
    """What all candidates have in common.

    Attributes:
        max_chunks: most stages per rank of interleaved schedules.
        limit: the memory limit per rank, in the unit of the costs.
        refit: whether schedules for equal passes are also refitted to the costs.
        setup: what was asked for: all rows have its offloading and its step, and what else it decides adds rows.
        offloading: limits for what moves to host memory, if anything may.
        divides: whether vocabulary parallelism was asked for, and is not only what layouts are compared with.
        replicas: those that shard weights, if such schedules are listed too.
        tensor_rate: bytes per ms of tensor parallelism over the replicas, if it is listed too.
    """

    max_chunks: int
    limit: float
    placements: Sequence[Placement]
    refit: bool
    setup: Setup
    offloading: Offloading | None = None
    divides: bool = False
    replicas: Replicas | None = None
    tensor_rate: float | None = None

    def rows(self, costs: Figures) -> Iterator[Candidate | DroppedVariant]:
        """Yield all rows."""
        kinds = variants_of(self.setup, costs)
        has_whole = any(variant.algorithm is None for variant in kinds)
        whole = [*self.whole(costs)] if has_whole else []
        divided = [row for variant in kinds if variant.algorithm for row in self.divided(variant)]
        hidden = [*self.hidden(costs)] if self.setup.pairs else []
        of_units = [] if self.replicas is None else [*self.sharded(costs, self.replicas)]
        yield from whole
        if self.setup.cuts is not None and has_whole:
            yield from self.sliced(costs, with_candidates(self.setup.cuts, costs))
        yield from divided
        if self.setup.early_recompute:
            yield from self.recomputing(costs)
        if self.setup.layout == BY_COST:
            both = divided if self.divides or not has_whole else []
            yield from self.laid_out((*whole, *both, *hidden, *of_units))
        yield from (*hidden, *of_units)
        if self.replicas is not None and self.tensor_rate is not None:
            yield from self.tensor(costs, self.replicas, self.tensor_rate)

    def bounds(self, costs: Figures, objective: Metric) -> tuple[Bounds, ...]:
        """Lower bounds, none with pairs: of whole sequences, for the rows of all variants; and of slices, where all are
        cut alike.
        """
        bounds_of = partial(self._bounds, Goal(objective, self.limit))
        least: dict[str, float] = {}
        first, *others = variants_of(self.setup, costs)
        for variant in (first, *others):
            for name, ms in bounds_of(variant).items():
                least[name] = min(ms, least.get(name, ms))
        cuts = self.setup.cuts
        among = () if cuts is None else with_candidates(cuts, first.costs).among
        of_slices = bounds_of(first, *among) if len(among) == 1 and len(among[0]) > 1 else {}
        return Bounds("lower_bound_ms", "", least), Bounds("sliced_lower_bound_ms", " of these slices", of_slices)

    def _bounds(self, goal: Goal, variant: Variant, slices: Slices = WHOLE) -> dict[str, float]:
        """The lower bound for each placement on which some schedule fits the limit."""
        bounds: dict[str, float] = {}
        costs = variant.costs
        for placement in () if self.setup.pairs else self.placements:
            if within(max(least_memory(costs.on(placement)[1], placement, fused=True)), goal.limit):
                work = Workload(placement, costs.num_microbatches, slices, variant.algorithm)
                bounds[label_of(placement)] = bound(costs, work, goal, self.offloading is not None).value_ms
        return bounds

    def whole(self, costs: Figures) -> Iterator[Candidate]:
        """Yield the schedules of whole sequences. Only a search depends on the limit for which it is made."""
        once = None if self.offloading is None else replace(self.offloading, limits=self.offloading.limits[:1])
        for way in self._ways(costs):
            row = way.row()
            yield row if row.question.is_search else row._replace(question=replace(row.question, offloading=once))

    def hidden(self, costs: Figures) -> Iterator[Candidate]:
        """Yield schedules that hide the all-to-all of experts: in pairs, or beneath weight gradients if it is known."""
        for name, recipe in SCHEDULES.items():
            if recipe.has_pairs or (costs.has_all_to_alls and name in _OVERLAPPED):
                end = WITH_PAIRS if recipe.has_pairs else WITH_OVERLAP
                for way in self._named(recipe, costs):
                    yield way.row(f" {end}", pairs=True)
        for way in self._searches(costs) if costs.has_all_to_alls else ():
            yield way.row(f" {WITH_PAIRS}", pairs=True)

    def sharded(self, costs: Figures, replicas: Replicas) -> Iterator[Candidate]:
        """Yield the schedules of whole sequences with several stages per rank, with sharded units."""
        for recipe in SCHEDULES.values():
            for way in self._named(recipe, costs) if not recipe.sliced and recipe.shape != "linear" else ():
                row = way.row(f" {SHARDED}", shards=Shards(), unit=None)
                yield row._replace(question=replace(row.question, replicas=replicas))

    def tensor(self, costs: Figures, replicas: Replicas, bytes_per_ms: float) -> Iterator[Candidate | DroppedVariant]:
        """Yield schedules with tensor parallelism over the replicas, or over groups of them."""
        for degree in range(2, replicas.count + 1):
            for name in _TENSOR if replicas.count % degree == 0 else ():
                yield from attempt(f"{name} tp{degree}", lambda: [self._tensor(costs, name, degree, bytes_per_ms)])  # noqa: B023

    def _tensor(self, costs: Figures, name: str, degree: int, bytes_per_ms: float) -> Candidate:
        assert costs.tensor is not None, "the flags are checked"
        divided = costs.tensor.divided(degree, bytes_per_ms, costs.given)
        (way,) = self._named(SCHEDULES[name], divided.costs)
        return way.row(f" tp{degree}")._replace(tensor_parallel=degree, tensor_bytes=divided.sent)

    def laid_out(self, rows: Iterable[Candidate]) -> Iterator[Candidate]:
        """Yield rows with layouts by cost; their costs are those of the even split."""
        for row in rows:
            name, title = (f"{text} ({LAID_OUT})" for text in (row.name, row.title))
            question = replace(row.question.deciding(layout=BY_COST), offloading=self.offloading)
            yield Candidate(name, title, question)

    def divided(self, variant: Variant) -> Iterator[Candidate]:
        """Yield them with the passes of vocabulary parallelism; searches for these have more to choose from."""
        suffix = f" (vocabulary {variant.algorithm})"
        return (way.row(suffix, vocabulary=variant.divided) for way in self._ways(variant.costs))

    def recomputing(self, costs: Figures) -> Iterator[Candidate]:
        """Yield them with recomputation as a pass of its own."""
        return (way.row(f" {WITH_R}", early_recompute=True) for way in self._ways(costs))

    def sliced(self, costs: Figures, cuts: Cuts) -> Iterator[Candidate]:
        """Yield one candidate per schedule of slices, each with the best of the cuts."""
        named = (way for recipe in SCHEDULES.values() if recipe.sliced for way in self._named(recipe, costs))
        for way in (*named, *self._searches(costs)):
            row = way.row(cuts=cuts)
            yield row._replace(name=f"{row.name} of slices", title=f"{row.title} n{{}}")

    def _ways(self, costs: Figures) -> Iterator[_Way]:
        for recipe in SCHEDULES.values():
            if recipe.sliced:
                continue
            yield from self._named(recipe, costs)
            if recipe.adapts and self.refit:
                yield from self._named(recipe, costs, f" {FITTED}")
        yield from self._searches(costs)

    def _named(self, recipe: Recipe, costs: Figures, fitted: str = "") -> Iterator[_Way]:
        """Yield a schedule by name with every number of stages, ``fitted`` to the costs or as published."""
        counts: Iterable[int | None] = range(2, self.max_chunks + 1) if recipe.shape == "interleaved" else (None,)
        unit = costs.num_ranks if recipe.has_units else None
        for chunks in counts:
            if fitted and costs.halves(recipe.placement(costs.num_ranks, recipe.num_chunks(chunks))):
                continue  # the costs of its stages are not known, only a lower bound
            name = (recipe.name if chunks is None else f"{recipe.name} x{chunks}") + fitted
            order = Named(recipe.name, chunks, equal_passes=recipe.adapts and not fitted)
            yield _Way(name, name, self._question(costs, order, unit))

    def _searches(self, costs: Figures) -> Iterator[_Way]:
        for on in self.placements:
            title = f"{ZB_AUTO} x{on.num_stages // on.num_ranks}" if name_of(on) in HAS_CHUNKS else ZB_AUTO
            yield _Way(f"{ZB_AUTO} {label_of(on)}", title, self._question(costs, Searched.on(on)))

    def _question(self, costs: Figures, order: Named | Searched, unit: int | None = None) -> Question:
        return Question(
            costs, Setup(order, unit, offload=self.setup.offload, step=self.setup.step), self.limit, self.offloading
        )
