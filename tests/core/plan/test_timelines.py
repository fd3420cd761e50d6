"""Tests of the timelines that plans are compared by: of one plan with several costs."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

from megatron.zero_bubble import PassCosts, PassMemory, build
from megatron.zero_bubble.core.costs.vocabulary import VocabularyCosts
from megatron.zero_bubble.core.plan import timelines
from megatron.zero_bubble.core.search.vocabulary import with_vocabulary


def test_what_ops_wait_for_is_found_once_for_several_costs() -> None:
    schedule = build("zb-h1", num_ranks=3, num_microbatches=4)
    shards, memory = VocabularyCosts.uniform(3, 0.2, 0.1), PassMemory.uniform(schedule.placement)
    costs = [replace(PassCosts.uniform(schedule.placement, 1.0, 2.0, 0.5, ms), vocabulary=shards) for ms in (0.0, 0.3)]
    made = with_vocabulary(schedule, costs[0], 2)
    with mock.patch.object(timelines, "steps", side_effect=timelines.steps) as found_once:
        found = list(timelines.timelines_of(made, costs, memory))
    assert found_once.call_count == 1
    assert found == [timelines.timeline_of(made, each, memory) for each in costs]
