"""The compiled loops must equal their Python references bit for bit."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zero_bubble import PassCosts, PassMemory, Placement
from megatron.zero_bubble.core import search
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.search.blocks import vee_block
from megatron.zero_bubble.core.search.loops import Loops, Reference, compiled, loops
from megatron.zero_bubble.core.search.problem import Problem
from megatron.zero_bubble.core.search.refill import Eagerness
from megatron.zero_bubble.core.search.seeds import seeds, serial

milliseconds = st.floats(0.5, 50.0)


def finer(num_ranks: int) -> list[Placement]:
    return [Placement.interleaved(num_ranks, 2), Placement.interleaved(num_ranks, 3), Placement.wave(num_ranks, 4)]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    num_ranks = draw(st.integers(1, 4))
    placement = draw(st.sampled_from([Placement.linear(num_ranks), Placement.vee(num_ranks), *finer(num_ranks)]))
    stages = placement.num_stages
    unit = draw(st.sampled_from([1.0, 1e13]))  # with the larger unit, a sum's rounding exceeds the loops' slack
    figures = st.lists(milliseconds.map(lambda ms: ms * unit), min_size=stages, max_size=stages).map(tuple)
    costs = PassCosts(draw(figures), draw(figures), draw(figures), draw(st.floats(0, 5)) * unit)
    memory = PassMemory((1.0,) * stages, (draw(st.floats(0.1, 1.0)),) * stages)
    if draw(st.booleans()):  # some backwards are fused
        memory = replace(memory, wgrad=draw(st.tuples(*[st.floats(0.1, 8.0)] * stages)))
    limit = (draw(st.floats(2.0, 4.0 * num_ranks)),) * num_ranks
    most = 9 if stages <= 2 * num_ranks else 4
    work = Workload(placement, draw(st.integers(1, most)))
    return Problem.of(work, costs, memory, limit, draw(st.sampled_from(["span", "makespan"])))


@pytest.fixture(scope="module")
def make() -> Callable[[Problem], Loops[Any]]:
    found = compiled()
    assert found is not None, "the tests require the compiled loops, which setup_env.sh builds"
    return found


@settings(max_examples=60)
@given(problems(), st.integers(0, 80))
def test_compiled_loops_equal_the_reference(make: Callable[[Problem], Loops[Any]], problem: Problem, skip: int) -> None:
    fast, slow = make(problem), Reference(problem)
    rows = next(islice(seeds(problem), skip, None), serial)(problem)
    packed = fast.pack(rows)
    assert fast.unpack(packed) == rows
    for how in product((None, [2] * problem.num_stages), (0.0, 0.6, 1.0), (False, True)):
        denser = fast.compact(packed, *how)
        compacted = slow.compact(rows, *how)
        assert (denser and fast.unpack(denser)) == compacted
        if denser:
            for backwards in (False, True):
                again = fast.compact(denser, None, 0.0, backwards)
                assert (again and fast.unpack(again)) == slow.compact(compacted, None, 0.0, backwards)
            assert fast.evaluate(denser) == slow.evaluate(compacted)
            assert fast.starts(denser) == slow.starts(compacted)
            cost, found = fast.refine(denser, 20, max(problem.forward), 3)
            assert (cost, fast.unpack(found)) == slow.refine(compacted, 20, max(problem.forward), 3)
    assert fast.evaluate(packed) == slow.evaluate(rows)
    shares = *map(Eagerness.even, (0.0, 0.3, 1.0)), Eagerness(0.1, 0.7, 1.3, 0.2)
    for eagerness, ambition in product(shares, (1.0, 1.5, float("inf"))):
        filled = fast.refill(packed, eagerness, ambition * max(problem.work))
        assert (filled and fast.unpack(filled)) == slow.refill(rows, eagerness, ambition * max(problem.work))
    for heat in (0.0, 5.0, max(problem.forward)):
        cost, found = fast.refine(packed, 40, heat, 7)
        assert (cost, fast.unpack(found)) == slow.refine(rows, 40, heat, 7)


def test_compiled_loops_equal_the_reference_on_many_ranks(make: Callable[[Problem], Loops[Any]]) -> None:
    """Above 32 ranks, compaction looks further ahead."""
    p, m = 48, 60
    costs, memory = PassCosts.uniform(Placement.vee(p), 10.0, 10.0, 10.0), PassMemory.uniform(Placement.vee(p))
    problem = Problem.of(Workload(Placement.vee(p), m), costs, memory, (0.75 * p,) * p, "span")
    fast, slow = make(problem), Reference(problem)
    rows = vee_block(problem, period=6, down=1, up=2, top=0, bottom=1)
    for backwards in (False, True):
        packed = fast.compact(fast.pack(rows), None, 0.0, backwards)
        rows = slow.compact(rows, None, 0.0, backwards)
        assert fast.unpack(packed) == rows


def equal_passes(placement: Placement, num_microbatches: int) -> Problem:
    costs, memory = PassCosts.uniform(placement, 1.0, 1.0, 1.0), PassMemory.uniform(placement)
    return Problem.of(Workload(placement, num_microbatches), costs, memory, (9.0,) * placement.num_ranks, "span")


@pytest.mark.parametrize(
    "rows, sentence",
    [
        ([[0, 1, 2]], "rows are needed for 2 ranks; got 1"),
        ([[0, 1, 2], [3, 4]], "rows must have each code 1 times; got code 5 0 times"),
        ([[0, 1, 2, 2], [3, 4, 5]], "got code 2 2 times"),
        ([[0, 1, 2], [3, 4, 2]], "the row of rank 1 must have codes of its stages; got 2"),
        ([[0, 1, 2], [3, 4, 6]], "the row of rank 1 must have codes of its stages; got 6"),
        ([[0, 1, 2], [3, 4, -1]], "the row of rank 1 must have codes of its stages; got -1"),
    ],
)
def test_rows_of_another_problem_are_rejected(
    make: Callable[[Problem], Loops[Any]], rows: list[list[int]], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        make(equal_passes(Placement.linear(2), 1)).pack(rows)


def test_packed_rows_fit_every_problem_of_the_same_shape(make: Callable[[Problem], Loops[Any]]) -> None:
    """The costs may differ; problems of another shape reject the rows, in every loop."""
    problem, other = equal_passes(Placement.linear(2), 3), equal_passes(Placement.vee(2), 3)
    packed = make(problem).pack(serial(problem))
    assert make(equal_passes(Placement.linear(2), 3)).unpack(packed) == serial(problem)
    wrong = make(other)
    for call in (
        lambda: wrong.unpack(packed),
        lambda: wrong.evaluate(packed),
        lambda: wrong.compact(packed),
        lambda: wrong.refill(packed, Eagerness.even(0.5), 9.0),
        lambda: wrong.refine(packed, 9, 0.0, 1),
    ):
        with pytest.raises(ValueError, match="were packed for other ranks, stages or microbatches"):
            call()
    with pytest.raises(ValueError, match="most_held must be one number for each of the 4 stages; got 2"):
        wrong.compact(wrong.pack(serial(other)), [1, 1])


@pytest.mark.parametrize(
    "column, figures, sentence",
    [
        ("rank", [0, 0, 0, 1, 1, 2], "rank must be from 0 to below 2; got 2"),
        ("rank", [0, 0, 0, 1, 1, 0], "a stage must be on one rank; stage 1 is not"),
        ("rank", [0] * 6, "rank 1 must have a stage"),
        ("duration", [1.0] * 5, "duration must have 6 figures; got 5"),
        ("hop", [float("nan")] * 6, "hop must have numbers; got nan"),
        ("successor", [3, -1, -1, 4, 1, 9], "successor must be from -1 to below 6; got 9"),
        ("successor", [3, -1, -1, 4, 3, -1], "must be the inverse of source; code 4 feeds 3"),
        ("wgrad", [-1, 1, -1, -1, 5, -1], "wgrad must be a W; got code 1"),
    ],
)
def test_inconsistent_tables_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Problem], Loops[Any]],
    column: str,
    figures: list[Any],
    sentence: str,
) -> None:
    problem = equal_passes(Placement.linear(2), 2)
    monkeypatch.setitem(vars(problem), "tables", problem.tables._replace(**{column: figures}))
    with pytest.raises(ValueError, match=sentence):
        make(problem)


def test_other_threads_run_during_a_long_call(make: Callable[[Problem], Loops[Any]]) -> None:
    problem = equal_passes(Placement.linear(8), 64)
    fast = make(problem)
    packed = fast.compact(fast.pack(serial(problem)))
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(fast.refine(packed, 20_000, 1.0, 0)))
    thread.start()
    turns = 0
    while thread.is_alive():
        turns += 1
        time.sleep(0.001)
    assert results and turns > 10


@pytest.fixture
def uncached() -> Iterator[None]:
    compiled.cache_clear()
    yield
    compiled.cache_clear()


@pytest.mark.usefixtures("uncached")
def test_reference_is_used_without_compiled_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.zero_bubble.core.search._planner", None)
    monkeypatch.delattr(search, "_planner", raising=False)
    assert compiled() is None
    assert isinstance(loops(equal_passes(Placement.linear(2), 1)), Reference)


@pytest.mark.usefixtures("uncached")
def test_unloadable_extension_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / f"_planner{EXTENSION_SUFFIXES[0]}"
    file.write_text("not what this Python loads")
    monkeypatch.delitem(sys.modules, "megatron.zero_bubble.core.search._planner", raising=False)
    monkeypatch.delattr(search, "_planner", raising=False)
    monkeypatch.setattr(search, "__path__", [str(tmp_path)])
    with pytest.raises(
        UserError, match="does not load from .*_planner.* install this package again, or delete that file"
    ):
        compiled()
