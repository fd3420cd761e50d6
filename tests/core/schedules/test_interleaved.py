"""Tests of interleaved schedules: validity, closed-form length and memory, and docstring pictures."""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble import Kind, Pass, PassCosts, build, simulate, validate
from megatron.zero_bubble.core.render.text import render_text
from megatron.zero_bubble.core.schedules import breadth_first, interleaved


@pytest.mark.parametrize(
    ("p", "m", "v"), [(1, 3, 2), (2, 2, 2), (2, 6, 3), (4, 4, 2), (4, 12, 2), (4, 16, 3), (8, 16, 4)]
)
def test_length_and_memory_match_closed_forms(p: int, m: int, v: int) -> None:
    """The span is mS + (p-1)S/v and 2pv-2 transfers; a rank stores at most 2(p-1) + (v-1)p + 1 chunks."""
    schedule = interleaved.build(p, m, v)
    validate(schedule)
    f, b, w, c = 3.0, 2.0, 4.0, 0.125
    timeline = simulate(schedule, PassCosts.uniform(schedule.placement, f, b, w, c if p > 1 else 0.0))
    if m >= 2 * p or p == 1:
        hops = 2 * p * v - 2 if p > 1 else 0
        assert timeline.span_ms == pytest.approx(m * (f + b + w) + (p - 1) * (f + b + w) / v + hops * c)
    chunks = min(m * v, 2 * (p - 1) + (v - 1) * p + 1)
    assert max(timeline.peak_activation) == pytest.approx(chunks / v)


def test_docstring_pictures_are_up_to_date() -> None:
    for module in (interleaved, breadth_first):
        schedule = module.build(2, 4, 2)
        drawn = render_text(simulate(schedule, PassCosts((1.0,) * 4, (1.0,) * 4, (1.0,) * 4)))
        assert drawn in (module.__doc__ or "")


@given(st.integers(1, 6), st.integers(1, 20), st.integers(2, 4))
def test_valid_for_any_number_of_microbatches(p: int, m: int, v: int) -> None:
    """As in Megatron, remaining microbatches join the last unit: a unit of fewer than p would deadlock."""
    validate(interleaved.build(p, m, v))


@given(st.integers(1, 6), st.integers(1, 20), st.integers(2, 4))
def test_breadth_first_length_and_memory_match_closed_forms(p: int, m: int, v: int) -> None:
    schedule = breadth_first.build(p, m, v)
    validate(schedule)
    timeline = simulate(schedule, PassCosts.uniform(schedule.placement, 3.0, 2.0, 4.0))
    if m >= p:
        assert timeline.span_ms == pytest.approx(m * 9.0 + (p - 1) * 9.0 / v)
    assert max(timeline.peak_activation) == pytest.approx(m)


def test_unsupported_chunk_counts_are_rejected() -> None:
    with pytest.raises(ValueError, match="needs 2 or more stages per rank; got 1; use 1f1b"):
        build("interleaved-1f1b", num_ranks=2, num_microbatches=2, num_chunks=1)
    with pytest.raises(ValueError, match="'zb-v' has 2 stages per rank; got 3"):
        build("zb-v", num_ranks=2, num_microbatches=2, num_chunks=3)


@pytest.mark.parametrize(("p", "m", "v"), [(1, 3, 2), (2, 2, 2), (2, 6, 3), (4, 4, 2), (4, 12, 2), (4, 16, 4)])
def test_rows_with_pairs_are_those_of_megatrons_combined_schedule(p: int, m: int, v: int) -> None:
    """The warm-up and the table of megatron-core with overlap_moe_expert_parallel_comm; each F of the steady state runs
    together with the backward that follows it.
    """
    stock = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    schedule = build("interleaved-1f1b", num_ranks=p, num_microbatches=m, num_chunks=v, pairs=True)
    table = stock.get_schedule_table(m, v, p)
    for rank in range(p):
        group = SimpleNamespace(size=lambda: p, rank=lambda rank=rank: rank)
        communicator = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=v)
        # megatron-core does not interleave on one rank: its combined schedule then warms up with one forward as well.
        warmup = v if p == 1 else stock.get_pp_rank_microbatches(m, v, p, False, True, p2p_communicator=communicator)[2]
        forward = [Pass(chunk * p + rank, Kind.F, microbatch) for microbatch, chunk in table]
        backward = [Pass((v - 1 - chunk) * p + rank, Kind.BW, microbatch) for microbatch, chunk in table]
        steady = list(zip(forward[warmup:], backward, strict=False))
        row = [*forward[:warmup], *chain.from_iterable(steady), *backward[len(steady) :]]
        assert schedule.order[rank] == tuple(row)
        assert {one for one, _ in steady} == schedule.pairs.intersection(row)
