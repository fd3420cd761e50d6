"""What is asked of the planner: costs and sizes, a setup of which some is left open, and limits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from operator import gt
from typing import Any

from megatron.zero_bubble.core.analysis.score import Goal, within
from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.core.ir import Schedule
from megatron.zero_bubble.core.ir.vocabulary import algorithm_of
from megatron.zero_bubble.core.plan.timelines import timeline_of
from megatron.zero_bubble.core.schedules import recipe
from megatron.zero_bubble.planning.feasibility import Feasibility
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.offload import NO_LIMITS, HostLimits
from megatron.zero_bubble.planning.plans import ADAPTING, peak_memory
from megatron.zero_bubble.planning.setup import BY_COST, DEFAULT_LIMIT, Given, Named, Searched, Setup
from megatron.zero_bubble.planning.shards import Replicas, replicas_of
from megatron.zero_bubble.planning.source import ZB_AUTO, ScheduleSource

_DIGITS = 1e4
"""A limit in units of 1F1B's peak is rounded to so many parts, so that a command with it asks for the same plan."""


@dataclass(frozen=True)
class Offloading:
    """Limits for what moves to host memory.

    Attributes:
        limits: the memory limits to make schedules for, of which one is taken after offloading, in the unit of the
            costs; None for no limit.
        limit: the device memory that the moves are to meet, in the unit of the costs; None for the least peak.
    """

    limits: tuple[float | None, ...]
    limit: float | None
    host: HostLimits = NO_LIMITS


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        costs: costs, pipeline ranks and microbatches; where the layout is chosen, ``Figures.evenly``; where activations
            move, with the times of copies.
        setup: what is decided. What it leaves open, with ``auto``, None, or several cuts, is left to the planner.
        limit: memory limit per rank, in the unit of the costs; None for no limit. A search needs one.
        offloading: limits for what moves to host memory, if the setup says that something may.
        replicas: those that shard weights, if the setup says so.
        starts: schedules that are known already, none of which may be better than the answer; with the passes of a
            divided vocabulary, if the setup has them.
        known: whether a search also offers schedules that may be better once activations move to host memory.
        ends: whether a search ends at a lower bound; for a schedule to which nothing is added (``adds_nothing``).
        effort: of a search for a schedule, as a share of the default.
        runs: what the answer must run on; None for any answer.
        instead: schedules that the answer is not worse than where ``runs`` refuses the best of a search.
    """

    costs: Figures
    setup: Setup
    limit: float | None = None
    offloading: Offloading | None = None
    replicas: Replicas | None = None
    starts: tuple[Schedule, ...] = ()
    known: bool = False
    ends: bool = False
    effort: float = 1.0
    runs: Feasibility | None = None
    instead: tuple[Schedule, ...] = ()

    def deciding(self, **decisions: Any) -> Question:
        """The question with other fields of its setup."""
        return replace(self, setup=replace(self.setup, **decisions))

    @property
    def schedule(self) -> str | None:
        """The name of the schedule, ``zb-auto`` for a search; None for one that is given."""
        return None if isinstance(self.setup.order, Given) else self.setup.name

    @property
    def objective(self) -> Metric:
        """The length by which schedules are compared."""
        return self.setup.objective

    @property
    def goal(self) -> Goal:
        """What schedules are compared by."""
        return Goal(self.objective, self.limit)

    @property
    def is_search(self) -> bool:
        """Whether a schedule is searched for."""
        return isinstance(self.setup.order, Searched)

    @property
    def by_cost(self) -> bool:
        """Whether the layers per stage are chosen together with the schedule."""
        return self.setup.layout == BY_COST

    @property
    def adds_nothing(self) -> bool:
        """Whether the answer is the schedule that a search finds, without passes or ops that are inserted later."""
        return not (self.setup.adds or self.known)

    @property
    def adapts(self) -> bool:
        """Whether the schedule is refitted to the costs."""
        order = self.setup.order
        return isinstance(order, Named) and not order.equal_passes and order.name in ADAPTING

    @property
    def searches(self) -> bool:
        """Whether the answer needs a search, which takes seconds."""
        return self.by_cost or self.is_search or self.adapts or self.replicas is not None

    @property
    def is_named(self) -> bool:
        """Whether the answer is a schedule by name as it is."""
        return isinstance(self.setup.order, Named) and not self.searches

    @property
    def has_units(self) -> bool:
        """Whether the schedule has units of microbatches."""
        return isinstance(self.setup.order, Named) and recipe(self.setup.order.name).has_units


def asked(
    setup: Setup,
    costs: Figures,
    memory_limit: str | None = None,
    host: HostLimits = NO_LIMITS,
    num_replicas: int = 1,
) -> Question:
    """What a setup of ``plan`` asks.

    Args:
        costs: with the times of copies and of collectives, and of the passes of a divided vocabulary, if it has those.
        memory_limit: as in ``plan --memory-limit``; None for the default of a search, and no limit for others.
        host: limits of the host, where activations move.
        num_replicas: those that shard weights, if they do.

    Raises:
        UserError: costs that do not suit the setup.
    """
    is_search = isinstance(setup.order, Searched)
    costs = costs.evenly() if setup.layout == BY_COST else costs
    text = memory_limit or (DEFAULT_LIMIT if is_search else None)
    limit = None if text is None else costs.limit(text)
    replicas = replicas_of(setup, costs, memory_limit, num_replicas)
    if setup.offload is None:
        return Question(costs, setup, limit, replicas=replicas)
    limits: tuple[float | None, ...] = (None,) if limit is None else (None, limit)
    if replicas is not None and limit is not None:
        limits = None, *search_limits(costs, limit)  # larger units may be within it once activations move
    if is_search and limit is not None:
        limits = search_limits(costs, limit, setup.inserts)
    return Question(costs, setup, limit, Offloading(limits, limit, host), replicas)


def search_limits(costs: Figures, limit: float, inserts: bool = False) -> tuple[float, ...]:
    """Return the memory limits to search with for schedules that ``limit`` bounds after offloading; itself first.

    Twice the peak of 1F1B is enough for every schedule without idle time.

    Args:
        inserts: return every second one, because passes of the vocabulary are inserted into what each search finds.
    """
    of_1f1b = costs.peak_of_1f1b
    larger = {1.5 * limit, 2.0 * limit, of_1f1b, 2.0 * of_1f1b}
    found = limit, *sorted(each for each in larger if not within(each, limit))
    return found[::2] if inserts else found


def of_run(costs: Figures, setup: Setup, runs: Feasibility | None = None) -> Question:
    """What a run of ``zb-auto`` asks.

    The default limit is at least the peak of the schedule that the run begins with. With vocabulary parallelism, the
    answer is not worse than that schedule; so it is where the run could not run what a search finds.

    Args:
        costs: with vocabulary parallelism, with the times of its passes.
        runs: what the run has for its plans; None to ask for any plan.
    """
    assert isinstance(setup.order, Searched), "only a search asks during a run"
    first = _first(costs, setup, runs)
    order = Setup(Searched.on(first.placement), step=setup.step).running(Setup.of(first))
    question = asked(order, costs, _raised(setup.order.limit or DEFAULT_LIMIT, costs, first))
    if (algorithm := algorithm_of(first)) is None:
        return replace(question, runs=runs, instead=(first,))
    return replace(question, runs=runs, starts=(replace(first, name=f"{ZB_AUTO} (vocabulary {algorithm})"),))


def _first(costs: Figures, setup: Setup, runs: Feasibility | None) -> Schedule:
    """The schedule that a run begins with."""
    memory = costs.of_ranks[1]
    grows = any(map(gt, memory.wgrad, memory.activation))
    messages = replace(setup.messages, receives=(runs or Feasibility()).post_receives)
    begun = replace(setup.unmeasured, messages=messages)
    return ScheduleSource.of(begun, costs.num_ranks, fused=grows).make(costs.num_microbatches)


def _raised(memory_limit: str, costs: Figures, first: Schedule) -> str:
    """The default limit, but at least the peak of the first schedule; another limit as it is."""
    if memory_limit != DEFAULT_LIMIT:
        return memory_limit
    peak = peak_memory(timeline_of(first, *costs.on(first.placement)), costs)
    if within(peak, costs.limit(DEFAULT_LIMIT)):
        return memory_limit
    return f"{math.ceil(peak / costs.peak_of_1f1b * _DIGITS) / _DIGITS:.10g}p"
