"""``--zero-bubble-offload auto`` in training: it measures, plans and switches without changing any result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest

from megatron.zero_bubble import PassCosts, PassMemory, build, simulate
from megatron.zero_bubble.core.ir import Plan
from megatron.zero_bubble.core.plan.offload import Move, offload, select_longest
from megatron.zero_bubble.engine.measure.gather import median_costs
from megatron.zero_bubble.integration.adapter.auto_offload import AutoMoves, costs_of_copies
from megatron.zero_bubble.integration.adapter.offloading import OffloadPart
from megatron.zero_bubble.planning.offload import plan_offload
from tests.helpers import parity
from tests.helpers.parity import Layout, Outcome, assert_same_bits
from tests.helpers.ranks import RankPool
from tests.integration.adapter.test_offload import CHUNKS, LARGE

STEPS = 7  # two warm-up, three measured, and two with the plan
AUTO = "--zero-bubble-offload auto"


class Ran(NamedTuple):
    """The outcome of a run; with ``auto``, the figures that it planned with, and its moves before and after."""

    outcome: Outcome
    figures: tuple[PassCosts, PassMemory] | None
    moves: tuple[Move, ...]


def train(rank: int, flags: str, schedules: Sequence[str]) -> list[Ran]:
    start, ran = None, []
    for args, pipeline in parity._under_each(flags, schedules):
        outcome, start = parity._train_once(args, parity._splits(args), start, pipeline)
        offloading = pipeline.part(OffloadPart)
        select = None if offloading is None else offloading._select
        prepared = next(each for (_, forward_only, *_), each in pipeline._prepared.items() if not forward_only)
        figures = select._figures if isinstance(select, AutoMoves) else None
        ran.append(Ran(outcome, figures, tuple(move for lowering in prepared.lowerings for move in lowering.what)))
    return ran


ROWS = {
    "zb-h2": (Layout(2, num_layers=4), ""),
    "zb-v": (Layout(2, num_layers=4), "--bf16"),
    "gis": (Layout(2, num_layers=4), CHUNKS),
    "seq-zb-h1": (Layout(2), "--zero-bubble-num-slices 2"),
    "zb-h1": (Layout(2), "--zero-bubble-vocabulary-parallel 1"),
    "1f1b": (Layout(4), "--zero-bubble-host-memory 64MiB"),
}


@pytest.mark.parametrize(
    "name", [name if name == "zb-h2" else pytest.param(name, marks=pytest.mark.full) for name in ROWS]
)
def test_same_bits_while_the_moves_are_measured_and_planned(ranks: RankPool, name: str) -> None:
    layout, options = ROWS[name]
    flags, runs = layout.flags(6, f"{LARGE} {options} --train-iters {STEPS}"), [name, f"{name} {AUTO}"]
    if "host-memory" in options:
        flags, runs[1] = flags.replace(options, ""), f"{runs[1]} {options}"
    results = ranks.run(layout.num_ranks, train, flags, runs, timeout=200)
    assert_same_bits([[ran.outcome for ran in of_rank] for of_rank in results], runs, STEPS)
    first, second = results[0][1], results[-1][1]
    assert first.figures == second.figures, "all ranks plan from the same figures"
    assert first.moves == second.moves
    assert first.figures is not None
    costs, memory = first.figures
    assert min(costs.host_ms) > 0 and min(memory.activation) > 4096, "bytes are measured"


def test_plan_is_that_of_the_command_line() -> None:
    """Before the measurement all that can move does; then what ``zero-bubble plan --offload auto`` selects."""
    schedule = build("zb-h2", num_ranks=3, num_microbatches=8)
    costs = PassCosts((2.0,) * 3, (2.0,) * 3, (2.0,) * 3, host_ms=(2.5, 2.5, 2.5))
    memory = PassMemory((1e6,) * 3, (5e5,) * 3)
    said: list[str] = []
    moves = AutoMoves(None, None, said.append)  # type: ignore[arg-type]
    assert moves(schedule) == select_longest(schedule, 1.0)
    moves._figures = costs, memory
    moves._moves.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.get_rank", lambda: 0)
        found = moves(schedule)
    assert found == plan_offload(simulate(schedule, costs, memory), costs, memory).moves
    assert 0 < len(found) < len(select_longest(schedule, 1.0))
    (line,) = said
    assert line.startswith("offload: iteration 1: ") and "copies at 0.4 GB/s" in line


def test_costs_have_the_median_time_of_copies() -> None:
    """On the simulated timeline of a plan with copies; a stage without any has the bandwidth of the others."""
    schedule = build("1f1b", num_ranks=3, num_microbatches=6)
    costs = PassCosts((2.0,) * 3, (2.0,) * 3, (2.0,) * 3, host_ms=(0.5, 0.75, 0.75))
    memory = PassMemory((2e6, 3e6, 1e6), (0.0,) * 3)
    plan = offload(Plan.bare(schedule), select_longest(schedule, 1.0, out=0, back=0))
    timeline = simulate(plan, costs, memory)
    measured = median_costs([timeline])
    assert measured.host_ms == pytest.approx((0.5, 0.75, 0.0))
    assert costs_of_copies(measured, memory).host_ms == pytest.approx((0.5, 0.75, 0.25))


def test_slices_that_stay_do_not_count_as_fast_copies() -> None:
    """The last slices of the last stages follow too closely to move; the others stand for them."""
    schedule = build("seq-1f1b", num_ranks=4, num_microbatches=6, num_slices=4)
    costs = PassCosts.uniform(schedule.placement, 2.0, 2.0, 2.0)
    costs = replace(costs, host_ms=(0.8,) * 4)
    plan = offload(Plan.bare(schedule), select_longest(schedule, 1.0))
    timeline = simulate(plan, costs, PassMemory.uniform(schedule.placement))
    assert median_costs([timeline]).host_ms == pytest.approx(costs.host_ms)
