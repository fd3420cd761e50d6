"""The schedules that ``zero-bubble compare`` compares: one candidate per row, made when it is its turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import NamedTuple, TypeVar

from megatron.zero_bubble.analysis.timeline import Metric, Timeline
from megatron.zero_bubble.cli.plan import MOST_CHUNKS
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.ir import Placement, Schedule, Slices
from megatron.zero_bubble.ir.sizes import check_size
from megatron.zero_bubble.plan.timelines import timeline_of
from megatron.zero_bubble.planning.cuts import shortest
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.layouts import Search, lay_out
from megatron.zero_bubble.planning.offload import Offloaded
from megatron.zero_bubble.planning.offload_search import best_offloaded
from megatron.zero_bubble.planning.plans import auto, auto_search, fitted, fitting_search
from megatron.zero_bubble.planning.shard_search import plan_shards
from megatron.zero_bubble.planning.shards import Replicas, ShardPlan
from megatron.zero_bubble.planning.source import AUTO
from megatron.zero_bubble.planning.vocabulary import Planned, Variant, known_schedules, searched, shards_inserted
from megatron.zero_bubble.schedules import SCHEDULES, build, sliced
from megatron.zero_bubble.search.auto import PLACEMENTS, PlacementChoice

T = TypeVar("T")
FITTED = "fitted"
"""Suffix for the name of a schedule for equal passes that was refitted to the costs."""
SHARDED = "sharded"
"""Suffix for the name of a schedule whose weights are sharded."""
_TENSOR = ("1f1b", "zb-h1", "zb-v")
"""Schedules that are also listed with tensor parallelism: Megatron's, and the best for one or two stages per rank."""
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


class Made(NamedTuple):
    """A schedule, its costs, Megatron's ``--pipeline-model-parallel-layout`` if the layout was chosen by cost, and the
    plan with offloading if it offloads, the plan of its sharded units if it has any, and how many GPUs divide a layer
    instead of replicas, with the bytes that a rank sends to them.
    """

    schedule: Schedule
    costs: Figures
    layout: str | None = None
    offloaded: Offloaded | None = None
    shards: ShardPlan | None = None
    tensor_parallel: int | None = None
    tensor_bytes: float | None = None

    def timeline(self) -> Timeline:
        """The timeline as it runs, with the copies if it offloads, and with the collectives of sharded units."""
        if self.offloaded is not None:
            return self.offloaded.timeline
        if self.shards is not None:
            return self.shards.timeline
        return timeline_of(self.schedule, *self.costs.on(self.schedule.placement))


class Candidate(NamedTuple):
    """One row.

    Attributes:
        name: for messages.
        make: raises ``UserError`` if the schedule does not exist.
        limited: whether what it makes depends on the memory limit.
        known: makes schedules that take its place if they are better with offloading.
    """

    name: str
    make: Callable[[], Made]
    limited: bool = True
    known: Callable[[], Iterable[Made]] = tuple


@dataclass(frozen=True)
class Comparison:
    """What all candidates have in common.

    Attributes:
        max_chunks: most stages per rank of interleaved schedules.
        limit: the memory limit per rank, in the unit of the costs.
        refit: whether schedules for equal passes are also refitted to the costs.
    """

    max_chunks: int
    limit: float
    placements: Sequence[PlacementChoice]
    objective: Metric
    refit: bool

    def whole(self, costs: Figures) -> Iterator[Candidate]:
        """Yield the schedules of whole sequences."""
        search = {f"{AUTO} {name}": name for name in self.placements}
        for way in self._ways(costs):
            make = partial(_made, costs, partial(way.make, costs))
            if (name := search.get(way.name)) is None:
                yield Candidate(way.name, make, limited=False)
            else:
                yield Candidate(way.name, make, known=partial(_known, costs, name, self.objective))

    def sharded(self, costs: Figures, replicas: Replicas) -> Iterator[Candidate]:
        """Yield the schedules of whole sequences with several stages per rank, with sharded units."""
        for recipe in SCHEDULES.values():
            if recipe.sliced or recipe.shape == "linear":
                continue
            for chunks in self._chunks if recipe.shape == "interleaved" else (None,):
                name = f"{recipe.name} {SHARDED}" if chunks is None else f"{recipe.name} x{chunks} {SHARDED}"
                yield Candidate(name, partial(_sharded, costs, recipe.name, name, chunks, replicas))

    def tensor(self, costs: Figures, replicas: Replicas, bytes_per_ms: float) -> Iterator[Candidate]:
        """Yield schedules with tensor parallelism over the replicas, or over groups of them."""
        for degree in range(2, replicas.count + 1):
            for name in _TENSOR if replicas.count % degree == 0 else ():
                shown = f"{name} tp{degree}"
                yield Candidate(shown, partial(_tensor, costs, name, shown, degree, bytes_per_ms), limited=False)

    def laid_out(self, costs: Figures) -> Iterator[Candidate]:
        """Yield them with layouts by cost; ``costs`` are those of the even split."""
        for way in self._ways(costs):
            yield Candidate(f"{way.name} ({LAID_OUT})", partial(self._with_layout, costs, way))

    def divided(self, variant: Variant) -> Iterator[Candidate]:
        """Yield them with the passes of vocabulary parallelism; searches for these have more to choose from."""
        search = {f"{AUTO} {name}": name for name in self.placements}
        for way in self._ways(variant.costs):
            many: Callable[[], Iterable[Schedule]] = partial(_only, partial(way.make, variant.costs))
            if (name := search.get(way.name)) is not None:
                many = partial(searched, variant, self.limit, name, self.objective)
            make = partial(shards_inserted, many, variant, self.limit, self.objective)
            yield Candidate(f"{way.name} (vocabulary {variant.algorithm})", partial(_made, variant.costs, make))

    def sliced(self, costs: Figures, slices: Sequence[Slices]) -> Iterator[Candidate]:
        """Yield one candidate per schedule of slices, each with the best of ``slices``; none without any."""
        if not slices:
            return
        makers: list[tuple[str, str, Callable[[Slices], Schedule]]] = []
        for name in sliced():
            for chunks in self._chunks if SCHEDULES[name].shape == "interleaved" else (None,):
                own = name if chunks is None else f"{name} x{chunks}"
                makers.append((own, own, partial(_cut, name, costs.num_ranks, costs.num_microbatches, chunks)))
        for placement in self.placements:
            makers.append((f"{AUTO} {placement}", AUTO, partial(auto, costs, self.limit, placement, self.objective)))
        for message, name, make in makers:
            best = partial(_best_cut, name, make, slices, costs, self.limit, self.objective)
            yield Candidate(f"{message} of slices", partial(_made, costs, best))

    @property
    def _chunks(self) -> range:
        return range(2, self.max_chunks + 1)

    def _ways(self, costs: Figures) -> Iterator[_Way]:
        p = costs.num_ranks
        for recipe in SCHEDULES.values():
            if recipe.sliced:
                continue
            for chunks in self._chunks if recipe.shape == "interleaved" else (None,):
                on = recipe.placement(p, recipe.num_chunks(chunks))
                name = recipe.name if chunks is None else f"{recipe.name} x{chunks}"
                yield _Way(name, on, partial(_named, recipe.name, name, chunks))
            if recipe.adapts and self.refit:
                name, fits = f"{recipe.name} {FITTED}", fitting_search(recipe.name, self.objective)
                yield _Way(name, on, partial(_fitted, recipe.name, name, self.objective), fits)
        for choice in self.placements:
            search = partial(auto, limit=self.limit, placement=choice, objective=self.objective)
            yield _Way(f"{AUTO} {choice}", PLACEMENTS[choice](p), search, auto_search(self.limit, self.objective))

    def _with_layout(self, costs: Figures, way: _Way) -> Made:
        make = partial(_on, way.make)
        best = lay_out(costs, [way.placement], make, self.limit, self.objective, way.search).best
        schedule = replace(best.schedule, name=f"{best.schedule.name} ({LAID_OUT})")
        return Made(schedule, best.costs, best.text)


class _Way(NamedTuple):
    """How to make one schedule for given costs, its placement, and how layouts are compared if it is searched for."""

    name: str
    placement: Placement
    make: Callable[[Figures], Schedule]
    search: Search | None = None


def _on(make: Callable[[Figures], Schedule], costs: Figures, _placement: Placement) -> Schedule:
    return make(costs)


def _made(costs: Figures, make: Callable[[], Schedule]) -> Made:
    return Made(make(), costs)


def _known(costs: Figures, placement: PlacementChoice, objective: Metric) -> Iterator[Made]:
    return (Made(schedule, costs) for schedule in known_schedules(costs, placement, objective))


def _only(make: Callable[[], T]) -> Iterator[T]:
    yield make()


def _named(name: str, shown: str, num_chunks: int | None, costs: Figures) -> Schedule:
    sizes = {"num_ranks": costs.num_ranks, "num_microbatches": costs.num_microbatches}
    schedule = build(name, **sizes, num_chunks=num_chunks)
    return replace(schedule, name=shown)


def _sharded(costs: Figures, name: str, shown: str, num_chunks: int | None, replicas: Replicas) -> Made:
    sizes = {"num_ranks": costs.num_ranks, "num_microbatches": costs.num_microbatches}

    def make(unit: int | None) -> Schedule:
        return replace(build(name, **sizes, num_chunks=num_chunks, unit_microbatches=unit), name=shown)

    plan = plan_shards(costs, [make], SCHEDULES[name].has_units, replicas)
    return Made(plan.timeline.schedule, costs, shards=plan)


def _tensor(costs: Figures, name: str, shown: str, degree: int, bytes_per_ms: float) -> Made:
    assert costs.tensor is not None, "the flags are checked"
    divided = costs.tensor(degree, bytes_per_ms)
    schedule = _named(name, shown, None, divided.costs)
    return Made(schedule, divided.costs, tensor_parallel=degree, tensor_bytes=divided.sent)


def _fitted(name: str, shown: str, objective: Metric, costs: Figures) -> Schedule:
    schedule = build(name, num_ranks=costs.num_ranks, num_microbatches=costs.num_microbatches)
    return replace(fitted(schedule, costs, objective), name=shown)


def _cut(name: str, num_ranks: int, num_microbatches: int, num_chunks: int | None, slices: Slices) -> Schedule:
    sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    return build(name, **sizes, num_chunks=num_chunks, num_slices=slices)


def _best_cut(
    own: str,
    make: Callable[[Slices], Schedule],
    slices: Sequence[Slices],
    costs: Figures,
    limit: float,
    objective: Metric,
) -> Schedule:
    found = shortest(make, slices, costs, limit, objective)
    return replace(found, name=f"{own} n{found.num_slices}")


def with_offload(
    within: Sequence[Candidate],
    move: Callable[[Timeline, Figures], Offloaded],
    limit: float,
    objective: Metric,
) -> Candidate:
    """Return the candidate that is the best after offloading; ``within`` has one candidate per limit of a search."""

    def make() -> Made:
        layouts: dict[Timeline, str | None] = {}

        def made(number: int) -> Iterator[Planned]:
            for one in chain(within[0].known() if number == 0 else (), _only(within[number].make)):
                timeline = one.timeline()
                layouts[timeline] = one.layout
                yield Planned(timeline, one.costs)

        best = best_offloaded(made, move, range(len(within) if within[0].limited else 1), limit, objective)
        before = best.planned.timeline
        return Made(before.schedule, best.planned.costs, layouts[before], best.offloaded)

    return within[0]._replace(make=make)
