"""Messages that take time from passes, on virtual clocks: the real executor and transport run as simulated."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.zero_bubble import PassCosts, Schedule, build
from megatron.zero_bubble.core.costs.vocabulary import VocabularyCosts
from megatron.zero_bubble.core.ir.vocabulary import FLOWS
from megatron.zero_bubble.core.schedules import SCHEDULES
from megatron.zero_bubble.core.search.vocabulary import with_vocabulary
from megatron.zero_bubble.engine.runtime.groups import Directions
from megatron.zero_bubble.engine.runtime.transport import Transport
from tests.helpers.emulate.execute import virtual_deviation_ms
from tests.helpers.emulate.links import VirtualCollectives
from tests.helpers.ranks import RankPool
from tests.helpers.strategies import costs_for, cuts

if TYPE_CHECKING:
    Case = tuple[Schedule, PassCosts]

RANKS = 3


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A registered schedule on three ranks, also of slices or with vocabulary parallelism, with any costs."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    slices = draw(cuts) if SCHEDULES[name].sliced else None
    schedule = build(name, num_ranks=RANKS, num_microbatches=draw(st.integers(1, 6)), num_slices=slices)
    costs = replace(draw(costs_for(schedule)), message_ms=draw(st.floats(0.01, 20.0)))
    if slices is None and draw(st.booleans()):
        schedule = with_vocabulary(schedule, costs, draw(st.sampled_from([*FLOWS])), delay=True)
        costs = replace(costs, vocabulary=VocabularyCosts.uniform(RANKS, 1.0, 2.0, 0.5, 0.5, 0.25))
    return schedule, costs


def deviations(_rank: int, drawn: list[Case]) -> list[tuple[float, str]]:
    assert dist.group.WORLD is not None
    transport, collectives = Transport(Directions.of(dist.group.WORLD), []), VirtualCollectives(dist.group.WORLD)
    found = [virtual_deviation_ms(*case, transport, collectives) for case in drawn]
    collectives.close()
    return found


@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(cases(), min_size=5, max_size=5))
def test_messages_take_time_as_simulated(ranks: RankPool, drawn: list[Case]) -> None:
    for rank, row in enumerate(ranks.run(RANKS, deviations, drawn)):
        for (schedule, costs), (ms, where) in zip(drawn, row, strict=True):
            assert ms <= 1e-6, (schedule.name, costs, rank, where)
