"""The functions that choose: one per decision. Each narrows one field of the question and asks on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain

from megatron.zero_bubble.core.analysis.score import is_less, length_ms
from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Placement, Schedule
from megatron.zero_bubble.core.plan.shard import check_chunks
from megatron.zero_bubble.core.schedules import recipe
from megatron.zero_bubble.core.search.placements import label_of
from megatron.zero_bubble.planning.cuts import cutting, search, with_candidates
from megatron.zero_bubble.planning.experts import hidden, searched_pairs
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.layout_plan import LayoutPlan
from megatron.zero_bubble.planning.layouts import lay_out
from megatron.zero_bubble.planning.offer import Ask, Chooser, Offer, score
from megatron.zero_bubble.planning.offload import AUTO, plan_offload
from megatron.zero_bubble.planning.plans import fitted, with_units
from megatron.zero_bubble.planning.question import Offloading, Question
from megatron.zero_bubble.planning.recompute import recomputing
from megatron.zero_bubble.planning.score import Best, DroppedVariant, Score, attempt, best
from megatron.zero_bubble.planning.setup import DEFAULT_CUTS, Cuts, Named, Searched
from megatron.zero_bubble.planning.shard_search import Maker, plan_shards
from megatron.zero_bubble.planning.shards import Replicas
from megatron.zero_bubble.planning.vocabulary import Variant, inserted, known_schedules, searched, variants

Offers = Iterator[Offer | DroppedVariant]
MOST_CHUNKS = 4
"""Most stages per rank to choose from, where nothing is given."""


def shards(question: Question, ask: Ask) -> Offers:
    """Choose stages per rank, microbatches of a unit, and whole stages, if weights are sharded."""
    if question.replicas is None:
        yield from ask(question)
        return
    own, order = replace(_cut(question).deciding(shards=None), replicas=None), question.setup.order

    def make(asked: Question, unit: int | None) -> Schedule:
        asked = asked.deciding(unit=unit or own.setup.unit)
        return _best(asked, ask(asked)).offer.schedule

    if isinstance(order, Named):
        counts = _counts(question.costs, order)
        makers: list[Maker] = [partial(make, own.deciding(order=replace(order, stages=count))) for count in counts]
    elif question.is_search:  # it takes seconds, and finds one schedule
        makers = [cache(partial(make, asked)) for asked in _with_room(own, question.replicas)]
    else:
        makers = [partial(make, own)]
    plan = plan_shards(question.costs, makers, question.has_units, question.replicas)
    yield Offer(plan.timeline.schedule, question.costs, (plan,), plan.timeline)


def _counts(costs: Figures, order: Named) -> Sequence[int | None]:
    """The stages per rank to choose from; None for the default of a schedule."""
    if order.stages != "auto":
        return (order.stages,)
    most = max(2, min(costs.most_layers or MOST_CHUNKS, MOST_CHUNKS))
    return range(2, most + 1) if recipe(order.name).shape == "interleaved" else (None,)


def _with_room(question: Question, replicas: Replicas) -> Iterator[Question]:
    """Yield the question for every placement with several stages per rank: within what the least weights leave of a
    limit that includes them, and within half of that, because the search does not know that more whole stages gather
    less.

    Raises:
        UserError: there is no such placement.
    """
    costs = question.costs
    for on in _several(_placements(question)):
        limit, sizes = question.limit, costs.sizes_on(on)
        if replicas.counts_weights and sizes is not None and limit is not None:
            ranks = map(on.stages_of, range(on.num_ranks))
            limit = max(0.0, limit - max(sizes.least_whole(stages, replicas.count) for stages in ranks))
        own = question.deciding(order=Searched.on(on))
        yield from (replace(own, limit=most) for most in (limit, None if limit is None else limit / 2))


def _placements(question: Question) -> tuple[Placement, ...]:
    """Those of a search."""
    order = question.setup.order
    assert isinstance(order, Searched), "only a search has a choice"
    return order.placements(question.costs.num_ranks)


def _several(choices: Sequence[Placement]) -> Sequence[Placement]:
    """Those of the placements with several stages per rank.

    Raises:
        UserError: there are none.
    """
    several = [on for on in choices if on.num_stages > on.num_ranks]
    if not several:
        check_chunks(choices[0])
    return several


def offload(question: Question, ask: Ask) -> Offers:
    """Choose what moves to host memory.

    A schedule above the limit may be within it once activations move, and is often shorter than one that needs no
    offloading. So schedules are made for the limit and for more memory, all are offloaded, and the shortest that is
    then within the limit is taken (arXiv 2503.01328, section 4, plans in the same two steps).
    """
    moving, setup = question.offloading, question.setup
    if moving is None:
        yield from ask(question)
        return
    least: Score | None = None
    seen: set[Timeline] = set()
    for limit in moving.limits:
        known = question.is_search and setup.cuts is None and limit == moving.limits[0]
        replicas = None if question.replicas is None else question.replicas.within(limit)
        asked = replace(question.deciding(offload=None), offloading=None, limit=limit, known=known, replicas=replicas)
        where = "" if limit is None else f" within {question.costs.show(limit)}"
        for offer in attempt(f"{question.schedule or 'a schedule'}{where}, before offloading,", partial(ask, asked)):
            if isinstance(offer, DroppedVariant):
                yield offer
                continue
            before = offer.timeline
            enough_ms = math.inf if least is None or least[0] else least[1]
            # Copies only delay, so what is longer already cannot become the best.
            if before in seen or length_ms(before, question.objective) > enough_ms:
                continue
            seen.add(before)
            moved = _moved(question, moving, offer)
            least = min(filter(None, (least, score(question, moved))))
            yield moved


def _moved(question: Question, moving: Offloading, offer: Offer) -> Offer:
    """The offer with what moves; of a limit that includes weights, activations have the rest."""
    costs, memory = offer.costs.on(offer.schedule.placement)
    replicas, limit, choice = question.replicas, moving.limit, question.setup.offload
    if limit is not None and replicas is not None and replicas.counts_weights:
        limit -= max(offer.static or (0.0,))
    share = AUTO if choice is None or choice.share is None else choice.share
    found = plan_offload(offer.timeline, costs, memory, share, limit, moving.host, offer.added)
    own = replace(offer, parts=tuple(part.on(found.timeline, memory) for part in offer.parts))
    return own.choosing(found, found.timeline)


def layout(question: Question, ask: Ask) -> Offers:
    """Choose the layers per stage, and with them the placement."""
    if not question.by_cost:
        yield from ask(question)
        return
    asked, order = replace(_cut(question).deciding(layout=None), known=False), question.setup.order
    questions = [asked]
    if isinstance(order, Named):
        counts = _counts(question.costs, order)
        questions = [asked.deciding(order=replace(order, stages=count)) for count in counts]
    for own in questions:
        offer = lay_out(own, _choices(own), ask)
        laid_out = offer.part(LayoutPlan)
        yield from () if laid_out is None else laid_out.dropped
        yield offer


def _choices(question: Question) -> Sequence[Placement]:
    """The placements that a layout may be for."""
    order, num_ranks = question.setup.order, question.costs.num_ranks
    if isinstance(order, Named):
        known = recipe(order.name)
        (count,) = _counts(question.costs, order)
        return (known.placement(num_ranks, known.num_chunks(count)),)
    if not question.is_search:
        return (_given(question).placement,)
    return _placements(question) if question.replicas is None else _several(_placements(question))


def vocabulary(question: Question, ask: Ask) -> Offers:
    """Choose the algorithm of vocabulary parallelism, or none."""
    choices = variants(question.costs, question.setup.vocabulary)
    for variant in choices:
        asked = partial(ask, replace(question.deciding(vocabulary=variant.divided), costs=variant.costs))
        name = f"vocabulary parallelism {variant.algorithm}" if variant.algorithm else "a whole vocabulary"
        yield from asked() if len(choices) < 2 else attempt(name, asked)


def slices(question: Question, ask: Ask) -> Offers:
    """Choose the cuts of sequences."""
    asked = _cut(question)
    if (cuts := asked.setup.cuts) is None:
        yield from ask(asked)
        return
    each = (
        attempt(f"{len(own)} slices", partial(ask, asked.deciding(cuts=replace(cuts, among=(own,)))))
        for own in cuts.among
    )
    yield from best(chain.from_iterable(each), partial(score, question), is_less, reason=-1).all


def schedules(question: Question, _ask: Ask) -> Offers:
    """Make the schedules; nothing is left to choose but what a search finds."""
    choices: tuple[Placement, ...] = ()
    if question.is_search:
        choices, dropped = with_costs(question.costs, _placements(question))
        yield from dropped

    def make(asked: Question) -> Iterator[Schedule]:
        variant = Variant(asked.setup.vocabulary, asked.costs)
        for schedule in _made(asked, variant, choices):
            yield inserted(schedule, variant, asked.goal)

    for schedule in recomputing(question, make) if question.setup.early_recompute else make(question):
        yield Offer(schedule, question.costs)


def with_costs(
    costs: Figures, choices: Sequence[Placement]
) -> tuple[tuple[Placement, ...], tuple[DroppedVariant, ...]]:
    """The placements for whose stages there are costs, and why there are none for the others.

    Raises:
        UserError: there are none for any.
    """
    found = [each for on in choices for each in attempt(label_of(on), partial(_if_costed, costs, on))]
    dropped = tuple(each for each in found if isinstance(each, DroppedVariant))
    if len(dropped) == len(found):
        raise UserError(dropped[0].reason)
    return tuple(each for each in found if not isinstance(each, DroppedVariant)), dropped


def _if_costed(costs: Figures, placement: Placement) -> tuple[Placement]:
    costs.on(placement)
    return (placement,)


def _made(question: Question, variant: Variant, choices: Sequence[Placement]) -> Iterator[Schedule]:
    """Yield the schedules, of a search on the best of these placements."""
    costs, cuts = question.costs, question.setup.cuts
    yield from question.starts
    order = question.setup.order
    if isinstance(order, Named) and question.setup.overlaps:
        yield from hidden(costs, order, partial(_named, question), question.adapts)
    elif isinstance(order, Named):
        yield _named(question, order)
    elif not question.is_search:
        yield _given(question)
    else:
        if variant.algorithm is not None and cuts is None:
            yield from searched(variant, choices, question.goal, question.effort)
            return
        if question.setup.pairs:
            yield searched_pairs(costs, choices, question.goal, question.effort)
            return
        if question.known:
            yield from known_schedules(costs, choices, question.objective)
        yield search(costs, choices, question.goal, cuts, question.effort, question.ends)


def _given(question: Question) -> Schedule:
    plan = question.setup.plan
    assert plan is not None, "the file has been read"
    return plan.schedule


def _named(question: Question, order: Named) -> Schedule:
    costs, unit, fits = question.costs, question.setup.unit, question.adapts and not order.equal_passes
    make = partial(costs.build, order.name, num_chunks=order.of_run)
    if recipe(order.name).sliced:
        return cutting(make, question.setup.cuts)()
    if question.has_units and unit is None:
        return with_units(make, costs, question.goal)
    schedule = make(unit_microbatches=unit if question.has_units else None)
    return fitted(schedule, costs, question.objective, question.ends) if fits else schedule


def _cut(question: Question) -> Question:
    """The question with the slices to choose from; without cuts, for a schedule that does not cut sequences.

    Raises:
        UserError: for slices of such a schedule.
    """
    cuts, order = question.setup.cuts, question.setup.order
    known = recipe(order.name) if isinstance(order, Named) else None
    if cuts is None and known is not None and known.sliced:
        cuts = Cuts(DEFAULT_CUTS)
    if cuts is not None:
        cuts = with_candidates(cuts, question.costs)
        if known is not None and not known.sliced:
            known.slices(max(cuts.among, key=len))
            cuts = None
    return question.deciding(cuts=cuts)


def _best(question: Question, offers: Iterable[Offer | DroppedVariant]) -> Best[Offer]:
    return best(offers, partial(score, question))


CHOOSERS: tuple[Chooser, ...] = (offload, vocabulary, layout, shards, slices, schedules)
"""Who chooses what, in this order: a chooser sees what those after it offer for each of its values."""
