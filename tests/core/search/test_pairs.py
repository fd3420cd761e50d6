"""The search for pairs: its orders are valid and within the limit, and not longer than those it knows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zero_bubble import PassCosts, Placement, Schedule, build, simulate, validate
from megatron.zero_bubble.core.analysis.memory import peaks_in_order
from megatron.zero_bubble.core.analysis.score import Goal
from megatron.zero_bubble.core.costs import PassMemory
from megatron.zero_bubble.core.costs.experts import ExpertParts
from megatron.zero_bubble.core.errors import Refusal, attempted
from megatron.zero_bubble.core.ir import Pass
from megatron.zero_bubble.core.plan import lower
from megatron.zero_bubble.core.schedules.alone import fuse_alone, split_alone
from megatron.zero_bubble.core.search.dice import Dice
from megatron.zero_bubble.core.search.loops import compiled_module
from megatron.zero_bubble.core.search.pair_lists import Habit, listed
from megatron.zero_bubble.core.search.pair_loops import improver
from megatron.zero_bubble.core.search.pair_moves import critical, improved, in_order
from megatron.zero_bubble.core.search.pair_tables import PairTables, length_of, peak
from megatron.zero_bubble.core.search.pairs import pairs_auto
from megatron.zero_bubble.planning.job.runnable import check_trainable

MS = st.floats(0.25, 4.0)


@st.composite
def figures(draw: st.DrawFn, on: Placement) -> tuple[PassCosts, PassMemory]:
    """Costs of stages with experts, all different, and memory."""
    parts = [ExpertParts(draw(st.integers(1, 2)), *(draw(MS) for _ in range(10))) for _ in range(on.num_stages)]
    forward = tuple(sum(own[1:5]) for own in parts)
    backward = tuple(sum(own[5:9]) for own in parts)
    wgrad = tuple(sum(own[9:]) for own in parts)
    message_ms = draw(st.sampled_from((0.0, 0.1)))
    costs = PassCosts(forward, backward, wgrad, draw(st.floats(0.0, 1.0)), message_ms=message_ms)
    activation = tuple(draw(st.floats(0.5, 1.0)) for _ in parts)
    memory = PassMemory(activation, tuple(draw(st.floats(0.0, 1.0)) for _ in parts))
    return costs.with_experts(tuple(parts), draw(st.sampled_from((1.0, 1.2)))), memory


def placements(num_ranks: int) -> Sequence[Placement]:
    return Placement.interleaved(num_ranks, 2), Placement.vee(num_ranks), Placement.interleaved(num_ranks, 3)


def known_on(on: Placement, num_microbatches: int) -> list[Schedule]:
    name = "dualpipe-v" if on == Placement.vee(on.num_ranks) else "interleaved-1f1b"
    chunks = on.num_stages // on.num_ranks if name == "interleaved-1f1b" else None
    sizes = {"num_ranks": on.num_ranks, "num_microbatches": num_microbatches, "num_chunks": chunks}
    own = build(name, **sizes, pairs=True)  # type: ignore[arg-type]
    return [own, fuse_alone(own), split_alone(own)]


@settings(max_examples=20)
@given(st.data(), st.integers(2, 3), st.integers(1, 5), st.sampled_from(["makespan", "span"]))
def test_searched_orders_are_valid_within_the_limit_and_not_longer_than_known_ones(
    data: st.DataObject, num_ranks: int, num_microbatches: int, objective: str
) -> None:
    on = data.draw(st.sampled_from(placements(num_ranks)))
    costs, memory = data.draw(figures(on))
    known = known_on(on, num_microbatches)
    peaks = [max(peaks_in_order(each, memory)) for each in known]
    goal = Goal(objective, data.draw(st.floats(0.7, 2.0)) * max(peaks))  # type: ignore[arg-type]
    search = partial(pairs_auto, lambda _: (costs, memory), [on], num_microbatches, goal, known, effort=1e-3)
    found = attempted(search)
    if isinstance(found, Refusal):
        assert "within the memory limit" in found.reason and all(each > goal.most for each in peaks)
        return
    validate(found)
    check_trainable(found)
    lower(found)
    assert max(peaks_in_order(found, memory)) <= goal.most * (1 + 1e-9)
    lengths = [ms(each, costs, objective) for each, most in zip(known, peaks, strict=True) if most <= goal.most]
    assert ms(found, costs, objective) <= min(lengths, default=math.inf) * (1 + 1e-9)


def ms(schedule: Schedule, costs: PassCosts, objective: str) -> float:
    timeline = simulate(schedule, costs)
    return timeline.makespan_ms if objective == "makespan" else timeline.span_ms


@settings(max_examples=20)
@given(st.data(), st.integers(2, 4), st.integers(1, 5))
def test_tables_time_orders_as_the_simulation_does(data: st.DataObject, num_ranks: int, num_microbatches: int) -> None:
    on = data.draw(st.sampled_from(placements(num_ranks)))
    costs, memory = data.draw(figures(on))
    tables = PairTables.of(costs, memory, on, num_microbatches)
    for schedule in known_on(on, num_microbatches):
        rows = tables.rows(schedule)
        assert tables.schedule(schedule.name, rows).order == schedule.order
        own = replace(schedule, overlap_experts=True)
        assert length_of(tables, rows, "makespan") == pytest.approx(ms(own, costs, "makespan"), rel=1e-9)
        assert length_of(tables, rows, "span") >= ms(own, costs, "span") * (1 - 1e-9)  # all-to-alls may end later
        assert max(map(peak, rows)) == pytest.approx(max(peaks_in_order(schedule, memory)))
        path = critical(tables, rows)
        assert len(path) == len(set(path)) and all(place < len(rows[rank]) for rank, place in path)


@settings(max_examples=20)
@given(st.data(), st.integers(2, 3), st.integers(1, 4), st.integers(0, 1000))
def test_lists_and_moves_keep_the_limit_and_the_order_of_every_microbatch(
    data: st.DataObject, num_ranks: int, num_microbatches: int, seed: int
) -> None:
    on = data.draw(st.sampled_from(placements(num_ranks)))
    costs, memory = data.draw(figures(on))
    tables, dice = PairTables.of(costs, memory, on, num_microbatches), Dice(seed)
    ahead = (None, 2 * num_ranks, num_ranks)[dice.below(3)]
    flags = bool(dice.below(2)), bool(dice.below(2)), bool(dice.below(2))
    habit = Habit(ahead, dice.below(3), (None, 2)[dice.below(2)], flags[0], (dice.uniform(), 1.0), 0.5, *flags[1:])
    limit = data.draw(st.floats(1.0, 4.0)) * on.num_stages / num_ranks
    rows = listed(tables, habit, limit)
    if rows is None:
        return
    validate(tables.schedule("listed", rows))
    assert all(in_order(tables, row) for row in rows)
    check_trainable(tables.schedule("listed", rows))
    least = max(limit, *map(peak, rows))
    length, better = improved(tables, rows, least, "makespan", 40, seed)
    assert compiled_module() is not None and improver(tables)(rows, least, "makespan", 40, seed) == (length, better)
    schedule = tables.schedule("improved", better)
    validate(schedule)
    check_trainable(schedule)
    assert length == pytest.approx(simulate(schedule, costs).makespan_ms)
    assert length <= length_of(tables, rows, "makespan") and max(map(peak, better)) <= least


def test_rows_that_wait_for_each_other_have_no_length() -> None:
    on = Placement.linear(2)
    tables = PairTables.of(PassCosts.uniform(on, 1.0, 1.0, 1.0), PassMemory.uniform(on), on, 2)
    rows = [[(Pass.parse("0F0"),), (Pass.parse("0F1"), Pass.parse("0BW0")), (Pass.parse("0BW1"),)]]
    rows += [[(Pass.parse("1F0"),), (Pass.parse("1F1"), Pass.parse("1BW0")), (Pass.parse("1BW1"),)]]
    assert length_of(tables, [[tables.step(works) for works in row] for row in rows], "makespan") == math.inf
