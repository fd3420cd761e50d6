"""Hypothesis strategies for schedules and costs; ``tests/conftest.py`` sets the number of examples."""

from __future__ import annotations

from hypothesis import strategies as st

from megatron.zero_bubble import SCHEDULES, PassCosts, Schedule, build

names = st.sampled_from(sorted(SCHEDULES))
num_ranks = st.integers(1, 8)
num_microbatches = st.integers(1, 20)
milliseconds = st.floats(0.1, 100.0)


@st.composite
def schedules(draw: st.DrawFn, min_ranks: int = 1, linear: bool = False) -> Schedule:
    """Draw a registered schedule, if ``linear`` one with one stage per rank; microbatches can be fewer than ranks."""
    ranks = draw(st.integers(min_ranks, 8))
    name = draw(names.filter(lambda name: SCHEDULES[name].shape == "linear") if linear else names)
    return build(name, num_ranks=ranks, num_microbatches=draw(num_microbatches))


@st.composite
def costs_for(draw: st.DrawFn, schedule: Schedule) -> PassCosts:
    """Draw different costs per stage and per link."""
    per_stage = st.lists(milliseconds, min_size=schedule.num_stages, max_size=schedule.num_stages).map(tuple)
    ranks = st.integers(0, schedule.num_ranks - 1)
    links = draw(st.dictionaries(st.tuples(ranks, ranks), milliseconds, max_size=3))
    return PassCosts(draw(per_stage), draw(per_stage), draw(per_stage), draw(st.floats(0.0, 20.0)), links)
