"""Tests of schedule sources: a name, a file or a search, each resolved once."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Literal

import pytest

from megatron.zero_bubble import (
    Kind,
    PassCosts,
    PassMemory,
    Placement,
    Slices,
    ZeroBubbleConfig,
    build,
    simulate,
    validate,
)
from megatron.zero_bubble.core.analysis.memory import peaks_in_order
from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.costs.even import even_costs
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.costs import CostsFile
from megatron.zero_bubble.core.formats.plan import plan_to_json
from megatron.zero_bubble.core.ir.vocabulary import Algorithm, algorithm_of
from megatron.zero_bubble.planning.cuts import slices_of
from megatron.zero_bubble.planning.job.runnable import check_runnable
from megatron.zero_bubble.planning.setup import Named, Setup, Shards
from megatron.zero_bubble.planning.source import ScheduleSource
from tests.helpers.sources import begun, named


@pytest.mark.parametrize("name", ["zb-v", "interleaved-1f1b", "dualpipe-v"])
def test_schedules_that_hide_the_all_to_all_of_experts(name: str) -> None:
    source = named(name, 2, pairs=True)
    for count in (1, 8):
        schedule = source.make(count)
        assert source.overlaps and schedule.overlaps
        assert bool(schedule.pairs) is (name != "zb-v" and count > 1)
        validate(schedule)
    assert any(p.kind is Kind.BW for p in schedule.passes())


def test_source_by_name() -> None:
    source = named("interleaved-1f1b", 2, 3)
    assert (source.name, source.placement) == ("interleaved-1f1b", Placement.interleaved(2, 3))
    for count in (2, 4):
        assert source.make(count) == build("interleaved-1f1b", num_ranks=2, num_microbatches=count, num_chunks=3)


def test_name_with_another_number_of_stages_is_rejected() -> None:
    with pytest.raises(ValueError, match="'zb-v' has 2 stages per rank; got 3; leave the number out"):
        named("zb-v", 2, 3)


def test_schedule_file_is_read_once(tmp_path: Path) -> None:
    schedule = build("v-half", num_ranks=3, num_microbatches=6)
    file = tmp_path / "plan.json"
    file.write_text(plan_to_json(simulate(schedule, PassCosts.uniform(schedule.placement, 1.0, 1.0, 1.0))))
    sources = ZeroBubbleConfig(schedule_file=str(file)).sources()
    file.unlink()
    source = sources(3)
    assert (source.name, source.placement) == (str(file), Placement.vee(3))
    assert source.make(6) == schedule


@pytest.mark.parametrize(("placement", "first"), [("linear", "zb-h1"), ("vee", "zb-v")])
def test_search_starts_from_a_named_schedule(placement: str, first: str) -> None:
    source = ZeroBubbleConfig("zb-auto", placement=placement).sources()(4)  # type: ignore[arg-type]
    assert source.name == "zb-auto"
    assert source.make(8) == build(first, num_ranks=4, num_microbatches=8)
    assert source.placement == source.make(8).placement


def test_search_for_slices_on_a_line_starts_from_a_named_schedule() -> None:
    for cuts in ({"num_slices": 2}, {"slice_ends": (5, 8)}):
        found = ZeroBubbleConfig("zb-auto", **cuts).sources()(4).make(8)  # type: ignore[arg-type]
        slices = slices_of(ZeroBubbleConfig("seq-zb-h1", **cuts).setup.cuts)  # type: ignore[arg-type]
        assert found == build("seq-zb-h1", num_ranks=4, num_microbatches=8, num_slices=slices)


@pytest.mark.parametrize(("p", "m", "n"), [(2, 3, 4), (4, 8, 4), (8, 1, 16)])
def test_first_schedule_of_slices_on_a_vee_has_about_the_memory_of_seq_zb_h1(p: int, m: int, n: int) -> None:
    source = begun("vee", p, Slices.even(n))
    schedule = source.make(m)
    assert (schedule.placement, schedule.num_slices) == (source.placement, n) == (Placement.vee(p), n)
    validate(schedule)
    known = build("seq-zb-h1", num_ranks=p, num_microbatches=m, num_slices=n)
    peaks, lengths = [], []
    for one in (schedule, known):
        costs, memory = PassCosts.uniform(one.placement, 1.0, 1.0, 1.0), PassMemory.uniform(one.placement)
        timeline = simulate(one, costs, memory)
        peaks.append(max(timeline.peak_activation))
        lengths.append(timeline.makespan_ms)
    assert peaks[0] <= peaks[1] + 1 / n + 1e-9
    assert lengths[0] < lengths[1]
    assert begun("vee", p, Slices.even(n)).make(m) == schedule, "the same on all ranks"


@pytest.mark.parametrize("placement", ["linear", "vee"])
@pytest.mark.parametrize("slices", [None, Slices.even(4)])
def test_first_schedule_can_split_the_last_backwards_only(
    placement: Literal["linear", "vee"], slices: Slices | None
) -> None:
    """Its peak is that of schedules without W passes, and what the last microbatch leaves to its own."""
    schedule = begun(placement, 4, slices, fused=True).make(6)
    validate(schedule)
    check_runnable(schedule, 4, 6)
    kinds = {(p.kind, p.microbatch) for p in schedule.passes()}
    assert kinds == {(kind, m) for m in range(6) for kind in (Kind.F, *((Kind.BW,) if m < 5 else (Kind.B, Kind.W)))}
    memory = PassMemory.uniform(schedule.placement, 1.0, 0.0)
    peaks = (max(peaks_in_order(schedule, replace(memory, wgrad=(w,) * schedule.num_stages))) for w in (0.0, 20.0))
    chunks = schedule.num_stages // 4
    least, swollen = peaks
    assert least <= 4 * chunks + 2
    assert swollen <= 20.0 * chunks + chunks


@pytest.mark.parametrize(("placement", "stock"), [("linear", "1f1b"), ("loop", "interleaved-1f1b")])
def test_first_schedule_can_be_megatrons_own(placement: Literal["linear", "loop"], stock: str) -> None:
    schedule = begun(placement, 4, keep_faster=True).make(8)
    validate(schedule)
    check_runnable(schedule, 4, 8)
    own = build(stock, num_ranks=4, num_microbatches=8)
    fused = tuple(
        tuple(p._replace(kind=Kind.BW) if p.kind is Kind.B else p for p in row if p.kind is not Kind.W)
        for row in schedule.order
    )
    assert fused == own.order
    assert {p.microbatch for p in schedule.passes() if p.kind is Kind.W} == {7}


@pytest.mark.parametrize("stock", [False, True])
@pytest.mark.parametrize(("placement", "slices"), [("linear", None), ("vee", None), ("loop", None), ("linear", 4)])
def test_first_schedule_is_within_the_limit(
    placement: Literal["linear", "vee", "loop"], slices: int | None, stock: bool
) -> None:
    cuts = None if slices is None else Slices.even(slices)
    free, small, bytes_ = (
        begun(placement, 4, cuts, keep_faster=stock, limit=limit).make(8) for limit in ("2p", "0.4p", "3GiB")
    )
    usual = begun(placement, 4, cuts, keep_faster=stock).make(8)
    assert free == bytes_ == usual
    validate(small)
    memory = PassMemory.uniform(small.placement)
    assert max(peaks_in_order(small, memory)) <= 0.4 * 4 < max(peaks_in_order(usual, memory))
    assert begun(placement, 4, cuts, keep_faster=stock, limit="0.01p").make(8) == usual
    fused = begun(placement, 4, cuts, fused=True, keep_faster=stock, limit="0.4p").make(8)
    validate(fused)
    assert {work.microbatch for work in fused.passes() if work.kind in (Kind.B, Kind.W)} == {7}


def test_unknown_name_and_missing_file_are_rejected_early(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown schedule 'zb-h3'"):
        ZeroBubbleConfig("zb-h3").sources()
    with pytest.raises(ValueError, match="cannot read the schedule file"):
        ZeroBubbleConfig(schedule_file=str(tmp_path / "none.json")).sources()


def divided_plan(algorithm: Algorithm) -> Timeline:
    """The simulation of ``zb-h1`` for 2 ranks and 3 microbatches, with passes of the vocabulary."""
    source = ZeroBubbleConfig("zb-h1", vocabulary=algorithm).sources()(2)
    return simulate(source.make(3), even_costs(source.placement))


@pytest.mark.parametrize("algorithm", [1, 2])
def test_vocabulary_is_that_of_the_file(tmp_path: Path, algorithm: Algorithm) -> None:
    file = tmp_path / "plan.json"
    timeline = divided_plan(algorithm)
    file.write_text(plan_to_json(timeline))
    for given in (None, algorithm):
        source = ZeroBubbleConfig(schedule_file=str(file), vocabulary=given, recompute_logits=True).sources()(2)
        assert source.setup.algorithm == algorithm and source.make(3) == timeline.schedule
    other: Algorithm = 2 if algorithm == 1 else 1
    message = f"vocabulary must be that of the schedule file, {algorithm}; got {other} with"
    with pytest.raises(UserError, match=message):
        ZeroBubbleConfig(schedule_file=str(file), vocabulary=other).sources()


def test_file_without_vocabulary_passes_does_not_suit_a_divided_vocabulary(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    schedule = build("zb-h1", num_ranks=2, num_microbatches=3)
    file.write_text(plan_to_json(simulate(schedule, PassCosts.uniform(schedule.placement, 1.0, 1.0, 1.0))))
    assert ZeroBubbleConfig(schedule_file=str(file)).sources()(2).setup.vocabulary is None
    with pytest.raises(UserError, match="vocabulary must be that of the schedule file, off; got 2"):
        ZeroBubbleConfig(schedule_file=str(file), vocabulary=2).sources()
    with pytest.raises(UserError, match="recompute_logits works only with vocabulary parallelism.* got .*plan.json"):
        ZeroBubbleConfig(schedule_file=str(file), recompute_logits=True).sources()


@pytest.mark.parametrize(("placement", "first"), [("linear", "zb-h1"), ("vee", "zb-v")])
def test_search_with_a_divided_vocabulary_starts_from_a_named_schedule(placement: str, first: str) -> None:
    source = ZeroBubbleConfig("zb-auto", placement=placement, vocabulary=2).sources()(2)  # type: ignore[arg-type]
    assert source.setup.algorithm == 2
    assert source.make(4) == ZeroBubbleConfig(first, vocabulary=2).sources()(2).make(4)


@pytest.mark.parametrize("unit", [None, 2])
def test_units_get_the_passes_of_the_vocabulary(unit: int | None) -> None:
    source = named("zero-pp", 2, 2, vocabulary=1, unit=unit)
    assert source.setup.algorithm == algorithm_of(source.make(4)) == 1


def limited(limit: str | None = None, costs: CostsFile | None = None, whole: int | None = 2) -> list[int]:
    """The sizes of the units of zero-pp on 4 ranks with 4 stages each, 16 microbatches."""
    shards = None if whole is None else Shards(whole)
    source = ScheduleSource.of(Setup(Named("zero-pp", 4, limit), shards=shards), 4, costs)
    (row, *_) = source.make(16).order
    kinds = (p.kind for p in row if p.stage == 0 and p.kind in (Kind.F, Kind.B))
    return [len([*group]) for kind, group in groupby(kinds) if kind is Kind.F]


def test_units_within_a_memory_limit() -> None:
    """A unit of 4 keeps 4 microbatches and the W's of the unit before; below the pipeline's depth, fewer."""
    assert limited() == limited("2p") == [4] * 4
    assert max(limited("0.8p")) < 4
    with pytest.raises(
        UserError, match="must fit into the memory limit of 0.1p; got 2 microbatches per rank with units of 1"
    ):
        limited("0.1p")
    with pytest.raises(UserError, match="give the costs file of an earlier run with --zero-bubble-costs, or"):
        limited("60GiB")


def test_units_for_measured_costs() -> None:
    """Long gathers ask for larger units, if weights are sharded; a limit in bytes holds for measured memory."""
    passes = '"forward_ms": 4, "backward_ms": 4, "wgrad_ms": 4, "activation": 1073741824, "wgrad": 1073741824'
    slow = CostsFile.parse(f'{{{passes}, "gather_ms": 60, "reduce_ms": 60}}')
    assert min(limited(None, slow)) > 4
    assert limited(None, slow, whole=None) == [4] * 4
    assert max(limited("4GiB", slow)) < 4


def test_limit_of_units_counts_each_stage_as_measured() -> None:
    """Four stages per rank, of which the last keeps most: figures per stage are not spread over the rank."""
    kept = [2.0**30] * 7 + [5 * 2.0**30]
    content = {name: [4.0] * 8 for name in ("forward_ms", "backward_ms", "wgrad_ms")}
    costs = CostsFile.parse(json.dumps({**content, "activation": kept, "wgrad": kept}))
    for limit in (12, 15, 30):
        setup = Setup(Named("zero-pp", 4, f"{limit}GiB"), shards=Shards(2))
        schedule = ScheduleSource.of(setup, 2, costs).make(16)
        memory = costs.on(schedule.placement)[1]
        assert memory is not None and max(peaks_in_order(schedule, memory)) <= limit * 2**30
