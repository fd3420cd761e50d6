"""The functions that choose: one per decision. Each narrows one field of the question and asks on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain

from megatron.zero_bubble.core.analysis.score import ROUNDING, is_less, length_ms
from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import WHOLE, Placement, Schedule, Slices
from megatron.zero_bubble.core.plan.shard import check_chunks
from megatron.zero_bubble.core.schedules import build, recipe
from megatron.zero_bubble.core.schedules.recipe import DEFAULT_SLICES
from megatron.zero_bubble.core.search.placements import label_of, placements
from megatron.zero_bubble.planning.cuts import Cuts
from megatron.zero_bubble.planning.experts import hidden
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.layouts import lay_out
from megatron.zero_bubble.planning.offer import Ask, Offer, score
from megatron.zero_bubble.planning.offload import plan_offload
from megatron.zero_bubble.planning.plans import auto, auto_search, fitted, fitting_search, with_units
from megatron.zero_bubble.planning.question import Offloading, Question
from megatron.zero_bubble.planning.score import Best, DroppedVariant, Score, attempt, best
from megatron.zero_bubble.planning.shard_search import Maker, plan_shards
from megatron.zero_bubble.planning.shards import Replicas
from megatron.zero_bubble.planning.source import ZB_AUTO
from megatron.zero_bubble.planning.vocabulary import Variant, inserted, known_schedules, searched

Offers = Iterator[Offer | DroppedVariant]


def shards(question: Question, ask: Ask) -> Offers:
    """Choose stages per rank, microbatches of a unit, and whole stages, if weights are sharded."""
    if question.shards is None:
        yield from ask(question)
        return
    own = replace(_cut(question), shards=None)

    def make(asked: Question, unit: int | None) -> Schedule:
        asked = replace(asked, unit=unit or own.unit)
        return _best(asked, ask(asked)).offer.schedule

    makers: list[Maker] = [partial(make, replace(own, num_chunks=(chunks,))) for chunks in question.num_chunks]
    if question.schedule == ZB_AUTO:  # a search takes seconds, and finds one schedule
        makers = [cache(partial(make, asked)) for asked in _with_room(own, question.shards)]
    plan = plan_shards(question.costs, makers, question.has_units, question.shards)
    yield Offer(plan.timeline.schedule, question.costs, shards=plan, simulated=plan.timeline)


def _with_room(question: Question, replicas: Replicas) -> Iterator[Question]:
    """Yield the question for every placement with several stages per rank: within what the least weights leave of a
    limit that includes them, and within half of that, because the search does not know that more whole stages gather
    less.

    Raises:
        UserError: there is no such placement.
    """
    costs, choices = question.costs, placements(question.placement, question.costs.num_ranks)
    several = [on for on in choices if on.num_stages > on.num_ranks]
    if not several:
        check_chunks(choices[0])
    for on in several:
        limit, sizes = question.limit, costs.sizes_on(on)
        if replicas.counts_weights and sizes is not None and limit is not None:
            ranks = map(on.stages_of, range(on.num_ranks))
            limit = max(0.0, limit - max(sizes.least_whole(stages, replicas.count) for stages in ranks))
        yield from (
            replace(question, placement=(on,), limit=most) for most in (limit, None if limit is None else limit / 2)
        )


def offload(question: Question, ask: Ask) -> Offers:
    """Choose what moves to host memory.

    A schedule above the limit may be within it once activations move, and is often shorter than one that needs no
    offloading. So schedules are made for the limit and for more memory, all are offloaded, and the shortest that is
    then within the limit is taken (arXiv 2503.01328, section 4, plans in the same two steps).
    """
    moving = question.offload
    if moving is None:
        yield from ask(question)
        return
    least: Score | None = None
    seen: set[Timeline] = set()
    for limit in moving.limits:
        known = question.schedule == ZB_AUTO and question.slices is None and limit == moving.limits[0]
        sharding = None if question.shards is None else question.shards.within(limit)
        asked = replace(question, offload=None, limit=limit, known=known, shards=sharding)
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
    own = moving.on(offer.costs)
    costs, memory = own.on(offer.schedule.placement)
    counts_weights = question.shards is not None and question.shards.counts_weights
    limit = moving.limit if moving.limit is None or not counts_weights else moving.limit - offer.static
    found = plan_offload(offer.timeline, costs, memory, moving.choice, limit, moving.host, offer.added)
    units = None if offer.shards is None else offer.shards.on(found.timeline, memory)
    return replace(offer, costs=own, offloaded=found, shards=units, simulated=found.timeline)


def search_limits(costs: Figures, limit: float, vocabulary: bool = False) -> tuple[float, ...]:
    """Return the memory limits to search with for schedules that ``limit`` bounds after offloading; itself first.

    Twice the peak of 1F1B is enough for every schedule without idle time.

    Args:
        vocabulary: return every second one, because each search also inserts the passes of the vocabulary.
    """
    of_1f1b = costs.peak_of_1f1b
    larger = {1.5 * limit, 2.0 * limit, of_1f1b, 2.0 * of_1f1b}
    found = limit, *sorted(each for each in larger if each > limit * (1 + ROUNDING))
    return found[::2] if vocabulary else found


def layout(question: Question, ask: Ask) -> Offers:
    """Choose the layers per stage, and with them the placement."""
    if not question.by_cost:
        yield from ask(question)
        return
    costs, limit, objective = question.costs, question.limit, question.objective
    if question.file is not None:
        choices: tuple[Placement, ...] = (question.file.placement,)
    elif question.schedule == ZB_AUTO:
        choices = placements(question.placement, costs.num_ranks)
    else:
        known = recipe(str(question.schedule))
        choices = (known.placement(costs.num_ranks, known.num_chunks(question.num_chunks[0])),)
    own = replace(_cut(question), by_cost=False, known=False)

    def make(figures: Figures, placement: Placement) -> Schedule:
        asked = replace(own, costs=figures, variants=(), placement=(placement,))
        return _best(asked, ask(asked)).offer.schedule

    search = None
    if own.slices is None and question.schedule == ZB_AUTO:
        assert limit is not None, "a search has a limit"
        search = auto_search(limit, objective)
    elif own.slices is None and question.adapts:
        search = fitting_search(str(question.schedule), objective)
    plan = lay_out(costs, choices, make, limit, objective, search)
    yield from plan.dropped
    yield Offer(plan.best.schedule, plan.best.costs, plan, simulated=plan.best.timeline)


def vocabulary(question: Question, ask: Ask) -> Offers:
    """Choose the algorithm of vocabulary parallelism, or none."""
    for variant in question.variants or (Variant(None, question.costs),):
        asked = partial(ask, replace(question, costs=variant.costs, variants=(variant,)))
        name = f"vocabulary parallelism {variant.algorithm}" if variant.algorithm else "a whole vocabulary"
        yield from asked() if len(question.variants) < 2 else attempt(name, asked)


def slices(question: Question, ask: Ask) -> Offers:
    """Choose the cuts of sequences."""
    asked = _cut(question)
    if asked.slices is None:
        yield from ask(asked)
        return
    assert not isinstance(asked.slices, Cuts)
    each = (attempt(f"{len(own)} slices", partial(ask, replace(asked, slices=(own,)))) for own in asked.slices)
    yield from best(chain.from_iterable(each), partial(score, question), is_less, reason=-1).all


def schedules(question: Question, _ask: Ask) -> Offers:
    """Make the schedules; nothing is left to choose but what a search finds."""
    (variant,) = question.variants
    if question.file is None and question.schedule == ZB_AUTO:
        own, dropped = with_costs(question.costs, placements(question.placement, question.costs.num_ranks))
        yield from dropped
        question = replace(question, placement=own)
    for schedule in _made(question, variant):
        yield Offer(inserted(schedule, variant, question.limit, question.objective), question.costs)


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


def _made(question: Question, variant: Variant) -> Iterator[Schedule]:
    costs, limit, placement, objective = question.costs, question.limit, question.placement, question.objective
    cut = _only_cut(question)
    yield from question.starts
    if question.file is not None:
        yield question.file
    elif question.schedule != ZB_AUTO:
        known = costs.on(Placement.linear(costs.num_ranks))[0].experts if question.pairs else ()
        named = hidden(_hiding(question), str(question.schedule), bool(known)) if question.pairs else [_named(question)]
        yield from named
    else:
        assert limit is not None, "a search has a limit"
        if variant.algorithm is not None and cut is None:
            yield from searched(variant, limit, placement, objective, question.effort)
            return
        if question.known:
            yield from known_schedules(costs, placement, objective)
        yield auto(costs, limit, placement, objective, cut or WHOLE, question.effort, question.ends)


def _named(question: Question) -> Schedule:
    costs, name = question.costs, str(question.schedule)
    (chunks,) = question.num_chunks
    make = partial(build, name, num_ranks=costs.num_ranks, num_microbatches=costs.num_microbatches, num_chunks=chunks)
    if recipe(name).sliced:
        return make(num_slices=_only_cut(question))
    if question.has_units and question.unit is None:
        limit = math.inf if question.limit is None else question.limit
        return with_units(make, costs, question.objective, limit)
    schedule = make(unit_microbatches=question.unit if question.has_units else None)
    return fitted(schedule, costs, question.objective, question.ends) if question.fits else schedule


def _hiding(question: Question) -> Iterator[Schedule]:
    """The schedules whose all-to-alls are hidden: with pairs, or else as published and as refitted to the costs."""
    sizes = {"num_ranks": question.costs.num_ranks, "num_microbatches": question.costs.num_microbatches}
    name = str(question.schedule)
    if recipe(name).has_pairs:
        yield build(name, **sizes, num_chunks=question.num_chunks[0], pairs=True)
        return
    yield _named(replace(question, fits=False))
    if question.adapts:
        yield _named(question)


def _cut(question: Question) -> Question:
    """The question with the cuts to choose from; None for a schedule that does not cut sequences.

    Raises:
        UserError: for slices of such a schedule.
    """
    cuts, name = question.slices, question.schedule
    known = None if name in (None, ZB_AUTO) else recipe(str(name))
    if cuts is None and known is not None and known.sliced:
        cuts = Cuts(len(DEFAULT_SLICES))
    if isinstance(cuts, Cuts):
        cuts = cuts.candidates(question.costs)
    if cuts is not None and known is not None and not known.sliced:
        known.slices(max(cuts, key=len))
        cuts = None
    return replace(question, slices=cuts)


def _only_cut(question: Question) -> Slices | None:
    cuts = question.slices
    assert not isinstance(cuts, Cuts), "they are chosen before"
    return None if cuts is None else cuts[0]


def _best(question: Question, offers: Iterable[Offer | DroppedVariant]) -> Best[Offer]:
    return best(offers, partial(score, question))
