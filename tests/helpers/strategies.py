"""Hypothesis strategies for schedules and costs; ``tests/conftest.py`` sets the number of examples."""

from __future__ import annotations

from hypothesis import strategies as st

from megatron.zero_bubble import SCHEDULES, PassCosts, Schedule, Slices, build

names = st.sampled_from(sorted(SCHEDULES))
num_ranks = st.integers(1, 8)
num_microbatches = st.integers(1, 20)
milliseconds = st.floats(0.1, 100.0)


cuts = st.lists(st.integers(1, 9), min_size=1, max_size=6).map(
    lambda parts: Slices(tuple(part / sum(parts) for part in parts))
)


@st.composite
def schedules(draw: st.DrawFn, min_ranks: int = 1, linear: bool = False) -> Schedule:
    """Draw a registered schedule, if ``linear`` one with one stage per rank; microbatches can be fewer than ranks.

    A schedule of slices gets uneven cuts.
    """
    ranks = draw(st.integers(min_ranks, 8))
    name = draw(names.filter(lambda name: SCHEDULES[name].shape == "linear") if linear else names)
    slices = draw(cuts) if SCHEDULES[name].sliced else None
    microbatches = draw(num_microbatches if slices is None else st.integers(1, 6))
    return build(name, num_ranks=ranks, num_microbatches=microbatches, num_slices=slices)


@st.composite
def costs_for(draw: st.DrawFn, schedule: Schedule) -> PassCosts:
    """Draw different costs per stage and per link."""
    per_stage = st.lists(milliseconds, min_size=schedule.num_stages, max_size=schedule.num_stages).map(tuple)
    ranks = st.integers(0, schedule.num_ranks - 1)
    links = draw(st.dictionaries(st.tuples(ranks, ranks), milliseconds, max_size=3))
    costs = PassCosts(draw(per_stage), draw(per_stage), draw(per_stage), draw(st.floats(0.0, 20.0)), links)
    if schedule.num_slices == 1:
        return costs
    share = st.floats(0.0, 1.0)
    shares = st.lists(share, min_size=schedule.num_stages, max_size=schedule.num_stages).map(tuple)
    return costs.with_attention(draw(shares), draw(shares))
