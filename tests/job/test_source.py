"""Tests of schedule sources: a name, a file or a search, each resolved once."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.zero_bubble import PassCosts, Placement, ZeroBubbleConfig, build, simulate
from megatron.zero_bubble.formats.plan import plan_to_json
from megatron.zero_bubble.job.source import ScheduleSource


def test_source_by_name() -> None:
    source = ScheduleSource.by_name("interleaved-1f1b", 2, 3)
    assert (source.name, source.placement) == ("interleaved-1f1b", Placement.interleaved(2, 3))
    for count in (2, 4):
        assert source.make(count) == build("interleaved-1f1b", num_ranks=2, num_microbatches=count, num_chunks=3)


def test_name_with_another_number_of_stages_is_rejected() -> None:
    with pytest.raises(ValueError, match="'zb-v' has 2 stages per rank; got 3; leave the number out"):
        ScheduleSource.by_name("zb-v", 2, 3)


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


def test_unknown_name_and_missing_file_are_rejected_early(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown schedule 'zb-h3'"):
        ZeroBubbleConfig("zb-h3").sources()
    with pytest.raises(ValueError, match="cannot read the schedule file"):
        ZeroBubbleConfig(schedule_file=str(tmp_path / "none.json")).sources()
