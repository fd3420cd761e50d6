"""The compiled loops do what their references in Python do, to the last bit."""

from __future__ import annotations

from itertools import islice, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zero_bubble import PassCosts, PassMemory, Placement
from megatron.zero_bubble.search.loops import Compiled, Reference, library
from megatron.zero_bubble.search.problem import Problem
from megatron.zero_bubble.search.seeds import seeds, serial

milliseconds = st.floats(0.5, 50.0)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    num_ranks = draw(st.integers(1, 4))
    placement = draw(st.sampled_from([Placement.linear, Placement.vee]))(num_ranks)
    stages = placement.num_stages
    unit = draw(st.sampled_from([1.0, 1e13]))  # in the greater one a sum's rounding is more than the loops' slack
    figures = st.lists(milliseconds.map(lambda ms: ms * unit), min_size=stages, max_size=stages).map(tuple)
    costs = PassCosts(draw(figures), draw(figures), draw(figures), draw(st.floats(0, 5)) * unit)
    memory = PassMemory((1.0,) * stages, (draw(st.floats(0.1, 1.0)),) * stages)
    limit = (draw(st.floats(2.0, 4.0 * num_ranks)),) * num_ranks
    return Problem.of(
        placement, draw(st.integers(1, 9)), costs, memory, limit, draw(st.sampled_from(["span", "makespan"]))
    )


@pytest.fixture(scope="module")
def compiled() -> type:
    found = library()
    assert found is not None, "setup_env.sh builds the package with its compiled loops"
    return lambda problem: Compiled(problem, found)


@settings(max_examples=60)
@given(problems(), st.integers(0, 40))
def test_same_bits(compiled: type, problem: Problem, skip: int) -> None:
    fast, slow = compiled(problem), Reference(problem)
    rows = next(islice(seeds(problem), skip, None), serial)(problem)
    packed = fast.pack(rows)
    assert fast.unpack(packed) == rows
    for how in product((None, [2] * problem.num_stages), (0.0, 0.6, 1.0), (False, True)):
        denser = fast.compact(packed, *how)
        assert (denser and fast.unpack(denser)) == slow.compact(rows, *how)
    assert fast.evaluate(packed) == slow.evaluate(rows)
    for eagerness, ambition in product((0.0, 0.3, 1.0), (1.0, 1.5, float("inf"))):
        filled = fast.refill(packed, eagerness, ambition * max(problem.work))
        assert (filled and fast.unpack(filled)) == slow.refill(rows, eagerness, ambition * max(problem.work))
    for heat in (0.0, 5.0, max(problem.forward)):
        cost, found = fast.refine(packed, 40, heat, 7)
        assert (cost, fast.unpack(found)) == slow.refine(rows, 40, heat, 7)
