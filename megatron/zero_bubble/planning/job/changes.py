"""The changes of a job that ``advise`` plans: what this package can do with its pipeline."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.pattern import Pattern
from megatron.zero_bubble.core.formats.plan import PlanFile
from megatron.zero_bubble.core.ir import Placement, Schedule
from megatron.zero_bubble.core.ir.vocabulary import Divided
from megatron.zero_bubble.core.schedules import SCHEDULES
from megatron.zero_bubble.core.schedules.recipe import Recipe
from megatron.zero_bubble.core.search.placements import label_of, name_of, placements
from megatron.zero_bubble.planning.answer import Answer
from megatron.zero_bubble.planning.change import MESSAGES, NUMBERS, ORDER, ROUNDED, SAME, Change
from megatron.zero_bubble.planning.cuts import least_tokens, with_candidates
from megatron.zero_bubble.planning.decisions import DECISIONS
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.job.pattern import FLAG as PATTERN
from megatron.zero_bubble.planning.layout_plan import LayoutPlan
from megatron.zero_bubble.planning.offload import AUTO
from megatron.zero_bubble.planning.plan_file import decided
from megatron.zero_bubble.planning.question import Offloading, Question
from megatron.zero_bubble.planning.recompute import WITH_R
from megatron.zero_bubble.planning.setup import (
    BY_COST,
    Cuts,
    Given,
    Named,
    Offload,
    Order,
    Searched,
    Setup,
    Shards,
)
from megatron.zero_bubble.planning.shards import Replicas, with_collectives
from megatron.zero_bubble.planning.source import ZB_AUTO
from megatron.zero_bubble.planning.vocabulary import variants

_STAGES = "--num-virtual-stages-per-pipeline-rank"
_VIRTUAL = (_STAGES, "--num-layers-per-virtual-pipeline-stage")
_LAYOUT = "--pipeline-model-parallel-layout"
_LAYERS = (
    _LAYOUT,
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)
_OVERLAP = ("--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute")
"""Megatron's own overlap of experts, in place of which a schedule of this package has pairs."""
_KEPT = ("", "step", "exact", "messages")
"""The parts of a setup that a change keeps."""
_OURS = (row for row in DECISIONS if row.path.partition(".")[0] not in _KEPT and row.path != "order.file")
DECIDABLE = frozenset((*_VIRTUAL, *_LAYERS, *_OVERLAP, *(f"--zero-bubble-{row.flag}" for row in _OURS)))
"""All flags that a change, or ``auto``, gives to a job or leaves out."""
_MOST_STAGES = 4
"""Most stages per rank of a change, unless the job has more."""
_MOST_SLICED_STAGES = 2
"""Most stages per rank on which slices are searched for."""
_GIB = 2**30
_MOST_PAIRED = 4
"""Most microbatches per rank with which an order of pairs is searched for."""
PLAN_FILE = "plan.json"
"""The file from which a job runs a plan that is known only by its order."""
STOCK = Setup()
"""A job without this package."""


@dataclass(frozen=True)
class JobChanges:
    """What changes start from.

    Attributes:
        placement: where its stages are now.
        costs: its costs; memory limits leave room for weights.
        limit: bytes of a GPU that a plan may take, or activation memory in the unit of the costs where bytes are not
            known.
        host_bandwidth: bytes per ms of copies between a GPU and its host.
        most_activations: limit of activation memory alone, in the unit of the costs.
        effort: of searches, relative to the default.
        setup: what the job runs now.
        pattern: the layers of a hybrid model.
        files: whether the job can run a plan file, which somebody has to write first.
    """

    placement: Placement
    costs: Figures
    limit: float
    host_bandwidth: float
    most_activations: float = math.inf
    effort: float = 1.0
    replicas: tuple[int, float] = (1, math.inf)
    setup: Setup = STOCK
    pattern: Pattern | None = None
    files: bool = True

    def quick_changes(self, schedule: Schedule) -> Iterator[Change]:
        """Yield its own schedule, those by name, with pairs too, and searches without and with two stages per rank."""
        given = Given(schedule.name, PlanFile(schedule))
        yield Change(schedule.name, self._asking(given, self.placement, 0.0), self.setup, self.placement)
        named = list(self._named())
        yield from named
        yield from self._recomputing(named)
        yield from self._paired()
        for change in self._searched():
            if name_of(change.placement) in ("linear", "vee"):
                yield change

    def named_changes(self) -> Iterator[Change]:
        """Yield schedules by name, Megatron's own too."""
        yield from self._of_megatron()
        named = list(self._named())
        yield from named
        yield from self._recomputing(named)
        yield from self._paired()

    def changes(self) -> Iterator[Change]:
        """Yield all changes: first schedules by name, then searches, then what else can be divided or moved."""
        yield from self.named_changes()
        searches = list(self._searched())
        yield from searches
        yield from self._recomputing(searches)
        paired = list(self._searched_pairs())
        yield from paired
        yield from map(self._laid_out, (*searches, *self._paired(), *paired) if self._takes_layouts else ())
        yield from self._divided(searches)
        yield from self._sliced(searches)
        if self.costs.in_bytes:
            yield from self._sharded()
            yield from map(self._offloaded, searches)

    @property
    def _own_stages(self) -> int:
        return self.placement.num_stages // self.placement.num_ranks

    @property
    def _takes_stages(self) -> bool:
        """Whether every version of Megatron with the flags of the job can give it other stages."""
        return self.pattern is None or self.pattern.flag == PATTERN

    @property
    def _takes_layouts(self) -> bool:
        return self.costs.layers is not None and self._takes_stages

    @property
    def _counts(self) -> list[int]:
        """Numbers of stages per rank above 1 that a rank of the job has layers for."""
        if not self._takes_stages:
            return []
        layers = self.costs.most_layers or _MOST_STAGES
        return list(range(2, max(min(_MOST_STAGES, layers), self._own_stages) + 1))

    def _of_megatron(self) -> Iterator[Change]:
        """Megatron's own schedules, without this package."""
        ranks, microbatches = self.costs.num_ranks, self.costs.num_microbatches
        for count in self._counts if microbatches % ranks == 0 and ranks > 1 else ():
            on = Placement.interleaved(ranks, count)
            if on != self.placement:
                question = self._asking(Named("interleaved-1f1b", count, equal_passes=True), on)
                setup = Setup(layout=self._layout_on(on))
                adds: tuple[str, ...] = _STAGES, str(count)
                if self.pattern is not None:  # which has to have them
                    setup, adds = replace(setup, layout=setup.layout or self.costs.needed_layout(on)), ()
                yield Change(f"Megatron's interleaving x{count}", question, setup, on, adds, self._drops(on), ORDER)

    def _named(self) -> Iterator[Change]:
        for recipe in SCHEDULES.values():
            if not (recipe.sliced or recipe.has_units or recipe.only_compared):
                yield from self._of_recipe(recipe)

    def _of_recipe(self, recipe: Recipe) -> Iterator[Change]:
        for count in self._counts if recipe.shape == "interleaved" else (None,):
            on = recipe.placement(self.costs.num_ranks, recipe.num_chunks(count))
            if on.num_stages > on.num_ranks and not self._takes_stages:
                continue
            question = self._asking(Named(recipe.name, count, equal_passes=True), on)
            title = recipe.name if count is None else f"{recipe.name} x{count}"
            yield self._change(title, question, self._named_on(recipe, on), on)

    def _recomputing(self, changes: list[Change]) -> Iterator[Change]:
        """Changes with recomputation as a pass of its own, of a job that recomputes whole layers."""
        if any(self.costs.of_ranks[0].recompute_ms):
            yield from (_deciding(own, f"{own.name} {WITH_R}", early_recompute=True) for own in changes)

    def _paired(self) -> Iterator[Change]:
        """Schedules whose forwards run together with backwards, to hide the all-to-all of experts."""
        if not self.costs.of_ranks[0].experts:
            return
        for recipe in SCHEDULES.values():
            for own in self._of_recipe(recipe) if recipe.has_pairs and recipe.shape != "linear" else ():
                yield _deciding(own, f"{own.name} with pairs", pairs=True)

    def _searched_pairs(self) -> Iterator[Change]:
        """The same on their stages in an order that is searched for, which a job runs from a file. With many
        microbatches, the known orders are nearly as short.
        """
        are_few = self.costs.num_microbatches <= _MOST_PAIRED * self.costs.num_ranks
        for own in self._paired() if self.files and are_few else ():
            on = own.placement
            question = self._asking(Searched.on(on), on).deciding(pairs=True)
            yield replace(own, name=f"{ZB_AUTO} {label_of(on)} with pairs", question=question, of_plan=_from_file)

    def _searched(self) -> Iterator[Change]:
        for on in self._placements:
            order = Searched.on(on, self._limit_text(on))
            yield self._change(f"{ZB_AUTO} {label_of(on)}", self._asking(order, on), order, on)

    @property
    def _placements(self) -> Iterator[Placement]:
        """Those that a search is tried on."""
        for on in placements("auto", self.costs.num_ranks, "auto"):
            if on.num_stages // on.num_ranks in (1, *self._counts):
                yield on

    def _laid_out(self, change: Change) -> Change:
        """A search with layers per stage that are chosen together with the schedule."""
        drops, setup = tuple(dict.fromkeys((*change.drops, *_VIRTUAL, *_LAYERS))), replace(change.setup, layout=None)
        question = replace(change.question.deciding(layout=BY_COST), costs=self._evenly)
        own = replace(change, name=f"{change.name}, layout", question=question, setup=setup, drops=drops)
        numbers = max(ORDER, change.numbers, key=list(NUMBERS).index)

        def of_plan(setup: Setup, plan: Answer) -> Setup:
            return self._with_layout(change.of_plan(setup, plan), plan)

        return replace(own, numbers=numbers, reorders=False, of_plan=of_plan)

    @cached_property
    def _evenly(self) -> Figures:
        return self.costs.evenly()

    def _divided(self, searches: list[Change]) -> Iterator[Change]:
        """The vocabulary divided over all ranks."""
        layers = self.costs.layers
        if layers is None or not layers.loss.work_ms:
            return
        for change in searches:
            if name_of(change.placement) not in ("linear", "vee"):
                continue
            for each in variants(self.costs, Divided("auto")):
                if each.divided is not None:
                    own = _deciding(change, f"{change.name}, vocabulary {each.algorithm}", vocabulary=each.divided)
                    question = replace(own.question, costs=each.costs)
                    yield replace(own, question=question, numbers=ROUNDED, reorders=False)

    def _sliced(self, searches: list[Change]) -> Iterator[Change]:
        """Sequences cut into slices, in schedules by name and, on few stages, in searched ones, with layouts too."""
        tokens, least = self.costs.sequence, least_tokens(self.costs)
        if tokens is None or tokens < 2 * least:
            return
        cuts = Cuts(among=tuple(each for each in with_candidates(Cuts(), self.costs).among if len(each) > 1))
        for recipe in SCHEDULES.values():
            if recipe.sliced and recipe.shape == "linear" and cuts.among:
                on, order = recipe.placement(self.costs.num_ranks, 1), Named(recipe.name)
                question = self._asking(order, on).deciding(cuts=cuts)
                own = self._change(f"{recipe.name}, slices", question, order, on)
                yield replace(own, numbers=ROUNDED, reorders=False, of_plan=self._cut)
        for search in searches if cuts.among else ():
            if search.placement.num_stages <= _MOST_SLICED_STAGES * self.costs.num_ranks:
                question = search.question.deciding(cuts=replace(cuts, among=cuts.among[-1:]))
                own = replace(search, name=f"{search.name}, slices", question=question)
                own = replace(own, numbers=ROUNDED, reorders=False, of_plan=self._cut)
                yield own
                if self._takes_layouts:
                    yield self._laid_out(own)

    def _sharded(self) -> Iterator[Change]:
        """Weights and gradients divided over the replicas, in units of microbatches."""
        count, bytes_per_ms = self.replicas
        if count < 2 or self.costs.weights is None or self.setup.validates:
            return
        costs = with_collectives(self.costs, count, None, None, bytes_per_ms)
        for own in (each for recipe in SCHEDULES.values() if recipe.has_units for each in self._of_recipe(recipe)):
            limit = self.limit - self._messages(own.placement)
            over = Replicas(count, None, None, limit, self.most_activations)
            own = _deciding(own, f"{own.name}, weights sharded", shards=Shards())
            question = replace(own.question, costs=costs, limit=0.0, replicas=over)
            yield replace(own, question=question, numbers=ROUNDED, reorders=False, of_plan=_sharded)

    def _offloaded(self, change: Change) -> Change:
        """A change with activations that move to host memory."""
        own, limit = _deciding(change, f"{change.name}, offloading", offload=Offload(AUTO)), change.question.limit
        costs = change.question.costs.with_copies(bytes_per_ms=self.host_bandwidth)
        moving = Offloading((limit, 2.0 * (limit or 0.0)), limit)
        return replace(own, question=replace(own.question, costs=costs, offloading=moving))

    def _asking(self, order: Order, on: Placement, limit: float | None = None) -> Question:
        """The question for whole sequences and layers in an order of passes, within what is left for activations."""
        limit = self._limit(on) if limit is None else limit
        return Question(self.costs, Setup(order, step=self.setup.step), limit, effort=self.effort)

    def _change(self, title: str, question: Question, order: Named | Searched, on: Placement) -> Change:
        """A change to whole sequences and layers, with the job's own way to step and to sum."""
        is_same, own = on == self.placement, self.setup
        setup = Setup(order, layout=self._layout_on(on), step=own.step, exact=own.exact, messages=own.messages)
        drops = (*_OVERLAP, *(() if is_same else self._drops(on)))
        return Change(title, question, setup, on, (), drops, SAME if is_same else ORDER, is_same)

    def _drops(self, on: Placement) -> tuple[str, ...]:
        """The flags that give the job another number of stages."""
        if self.pattern is not None and on.num_stages > on.num_ranks:
            return (*_VIRTUAL, *_LAYERS)  # only its pattern gives a rank several of them
        return () if self._keeps_stages(on) else _VIRTUAL

    def _layout_on(self, on: Placement) -> str | None:
        is_own = on == self.placement or self._keeps_stages(on)
        if self.pattern is not None:  # which is divided alike for all placements with as many stages
            is_own = on.num_stages == self.placement.num_stages
        return self.setup.layout if is_own else None

    def _keeps_stages(self, on: Placement) -> bool:
        return keeps_stages(self.placement, on)

    def _named_on(self, recipe: Recipe, on: Placement) -> Named:
        """A schedule by name, with the stages per rank of an interleaved one that the job does not have."""
        is_other = name_of(on) == "loop" and on != self.placement
        return Named(recipe.name, on.num_stages // on.num_ranks if is_other else None)

    def _limit(self, on: Placement) -> float:
        """The limit of activations on a placement: what weights and messages leave."""
        costs = self.costs
        if not costs.in_bytes:
            return min(self.limit, self.most_activations)
        left = min(self.limit - self._weights(on) - self._messages(on), self.most_activations)
        return max(left, costs.microbatch)  # without room, the least plan is above it

    def _weights(self, on: Placement) -> float:
        """Bytes of weights on the fullest rank; 0 for stages that the model cannot fill, which planning refuses."""
        with suppress(UserError):
            return max(self.costs.weights_on(on) or (0.0,))
        return 0.0

    def _messages(self, on: Placement) -> float:
        """Bytes of messages that a rank has room for."""
        return MESSAGES * (on.num_stages // on.num_ranks) * (self.costs.message_bytes or 0.0)

    def _limit_text(self, on: Placement) -> str:
        limit, costs = self._limit(on), self.costs
        if costs.in_bytes:
            return f"{math.floor(limit / _GIB * 100) / 100}GiB"
        return f"{limit / costs.peak_of_1f1b:.4g}p"

    def _cut(self, setup: Setup, plan: Answer) -> Setup:
        assert self.costs.sequence is not None, "slices are planned for known sequences"
        return replace(setup, cuts=Cuts(None, plan.schedule.slices.in_tokens(self.costs.sequence)))

    def _with_layout(self, setup: Setup, plan: Answer) -> Setup:
        """With the layout, unless the job has these layers without one; the pattern of a hybrid model always has it."""
        laid_out = plan.part(LayoutPlan)
        assert laid_out is not None, "the layout was asked for"
        best, evenly, on = laid_out.best, plan.question.costs, plan.schedule.placement
        is_own = evenly.needed_layout(on) is None and tuple(best.layout) == tuple(evenly.layout(on))
        return setup if is_own and self.pattern is None else replace(setup, layout=best.text)


def _deciding(change: Change, name: str, **decisions: Any) -> Change:
    """A change that also decides something else, which its job and its question have alike."""
    question, setup = change.question.deciding(**decisions), replace(change.setup, **decisions)
    return replace(change, name=name, question=question, setup=setup)


def _from_file(setup: Setup, plan: Answer) -> Setup:
    """With the order of a file that has the plan."""
    return replace(setup, order=Given(PLAN_FILE, decided(plan)), pairs=False)


def _sharded(setup: Setup, plan: Answer) -> Setup:
    sharding = plan.added.sharding
    assert sharding is not None, "weights are sharded"
    return replace(setup, unit=sharding.unit_microbatches, shards=Shards(sharding.open_chunks))


def stage_flags(own: Placement, other: Placement) -> tuple[str, ...]:
    """Return the flags that a job leaves out to run on another placement: those that give its number of stages."""
    return () if keeps_stages(own, other) else (*_VIRTUAL, _LAYOUT)


def keeps_stages(own: Placement, other: Placement) -> bool:
    """Whether a job runs on another placement with the flags that give its number of stages."""
    return other.num_stages == own.num_stages and name_of(other) == "loop"
