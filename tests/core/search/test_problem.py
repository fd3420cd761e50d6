"""The loops' tables must agree with the schedule's dependencies."""

from __future__ import annotations

import pytest

from megatron.zero_bubble import Kind, Pass, PassCosts, PassMemory, Placement
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.search.problem import NONE, Problem
from megatron.zero_bubble.core.search.seeds import serial

PLACEMENTS = (Placement.linear(1), Placement.linear(3), Placement.vee(3), Placement.interleaved(2, 2))


def code_of(p: Pass) -> int:
    return 3 * p.stage + (Kind.F, Kind.B, Kind.W).index(p.kind)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_tables_equal_the_schedules_dependencies(placement: Placement) -> None:
    costs, memory = PassCosts.uniform(placement, 1.0, 1.0, 1.0), PassMemory.uniform(placement)
    problem = Problem.of(Workload(placement, 1), costs, memory, (9.0,) * placement.num_ranks, "span")
    schedule, tables = problem.schedule("serial", serial(problem)), problem.tables
    fed: dict[int, set[int]] = {code_of(p): set() for p in schedule.passes()}
    for p in schedule.passes():
        before = [code_of(other) for other in schedule.dependencies(p)[:1]]  # further inputs are available earlier
        assert before == ([] if tables.source[code_of(p)] == NONE else [tables.source[code_of(p)]])
        for code in before:
            fed[code].add(code_of(p))
    for code, others in fed.items():
        assert {tables.successor[code], tables.wgrad[code]} - {NONE} == others
        ranks = {tables.rank[other] for other in others} - {tables.rank[code]}
        assert {tables.receiver[code]} - {NONE} == ranks
