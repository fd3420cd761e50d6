"""Tests of plans with post-validation: where an iteration stops if the previous optimizer step is rejected."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given

from megatron.zero_bubble import Kind, PassCosts, Schedule, build
from megatron.zero_bubble.core.analysis.period import repeatable
from megatron.zero_bubble.core.costs.vocabulary import VocabularyCosts
from megatron.zero_bubble.core.errors import PlanError
from megatron.zero_bubble.core.ir import Compute, Plan, Recv, Send, Settle, Validate
from megatron.zero_bubble.core.ir.vocabulary import Algorithm
from megatron.zero_bubble.core.plan import Additions, communicate, lower, plan_of, prove, with_validation
from megatron.zero_bubble.core.search.vocabulary import with_vocabulary
from tests.helpers.strategies import schedules


def validated(schedule: Schedule) -> Plan:
    return lower(schedule, (communicate, with_validation))


@given(schedules(min_ranks=2))
def test_repeatable_passes_are_forwards_with_repeatable_inputs(schedule: Schedule) -> None:
    stage_to_rank, before = schedule.placement.stage_to_rank, repeatable(schedule)
    for row in before:
        for p in row:
            assert p.kind is Kind.F
            assert all(d in before[stage_to_rank[d.stage]] for d in schedule.dependencies(p))


@given(schedules(min_ranks=2))
def test_drain_completes_all_started_messages(schedule: Schedule) -> None:
    plan = validated(schedule)
    stopped = [(*ops[: ops.index(Validate())], *drain) for ops, drain in zip(plan.ops, plan.drain, strict=True)]
    for kinds in ((Send, Recv), (Send, Settle)):
        per_channel = [
            {
                channel: [
                    op.message for row in stopped for op in row if type(op) is kind and op.message.channel == channel
                ]
                for channel in plan.channels
            }
            for kind in kinds
        ]
        assert per_channel[0] == per_channel[1]


@given(schedules(min_ranks=2))
def test_with_validation_only_inserts_validate(schedule: Schedule) -> None:
    plan, with_stop = lower(schedule), validated(schedule)
    assert tuple(tuple(op for op in row if op != Validate()) for row in with_stop.ops) == plan.ops
    assert all(row.count(Validate()) == 1 for row in with_stop.ops)
    assert with_stop.digest != plan.digest


@given(schedules(min_ranks=2))
def test_incomplete_drain_is_rejected(schedule: Schedule) -> None:
    plan = validated(schedule)
    rank = next((rank for rank, ops in enumerate(plan.drain) if ops), None)
    assume(rank is not None)
    drain = tuple(ops[1:] if row == rank else ops for row, ops in enumerate(plan.drain))
    with pytest.raises(PlanError):
        prove(replace(plan, drain=drain))


def test_repeatable_passes_of_zb_h2_are_its_warm_up() -> None:
    plan = validated(build("zb-h2", num_ranks=2, num_microbatches=4))
    computed = [[op for op in ops[: ops.index(Validate())] if isinstance(op, Compute)] for ops in plan.ops]
    assert [" ".join(map(str, row)) for row in computed] == ["0F0 0F1 0F2", "1F0"]
    assert " ".join(map(str, plan.drain[1])) == "0F2<0 1B0>0 1B0=0"


@pytest.mark.parametrize("algorithm", [1, 2])
@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zb-v"])
def test_the_loss_of_vocabulary_parallelism_reads_the_loss_scale_after_it_was_validated(
    name: str, algorithm: Algorithm
) -> None:
    schedule = build(name, num_ranks=4, num_microbatches=9)
    costs = PassCosts.uniform(schedule.placement, 18.0, 18.0, 9.0, 0.6)
    costs = replace(costs, vocabulary=VocabularyCosts.uniform(4, 4.0, 3.0, 0.5, 0.7))
    plan = plan_of(with_vocabulary(schedule, costs, algorithm, 0.5), Additions(post_validation=True))
    before = [[op.work.kind for op in ops[: ops.index(Validate())] if isinstance(op, Compute)] for ops in plan.ops]
    assert {kind for row in before for kind in row} == {Kind.F, Kind.I, Kind.S}
