"""``zb-auto`` in training: it measures, plans beside the run, switches, and changes no bit of what is computed."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.runtime.auto import _Planner
from tests.helpers.parity import Layout, Outcome, assert_same_bits, assert_same_model, train
from tests.helpers.ranks import RankPool

STEPS = 14  # two to warm up, four measured, a switch, and again four measured under the plan
SCHEDULES = [None, "zb-auto"]


def train_and_wait_for_the_plan(rank: int, flags: str) -> tuple[list[Outcome], list[str]]:
    """The outcomes and what came of planning; at the first look at the planner it is waited for, however slow."""
    finished, result, said = _Planner.finished, _Planner.result, []

    def waited_for(self: _Planner) -> bool:
        self._process.wait()
        return finished(self)

    def heard(self: _Planner) -> object:
        schedule, text = result(self)
        said.append(text if schedule is None else f"{text}: {schedule.name}")
        return schedule, text

    _Planner.finished, _Planner.result = waited_for, heard
    try:
        return train(rank, flags, SCHEDULES), said
    finally:
        _Planner.finished, _Planner.result = finished, result


ON_A_V = "--zero-bubble-placement vee"


@pytest.mark.parametrize(
    "options", ["", ON_A_V, "--bf16 --overlap-grad-reduce --use-distributed-optimizer --ddp-bucket-size 1000"]
)
def test_a_switch_changes_no_bit(ranks: RankPool, options: str) -> None:
    layout = Layout(2, data=2 if "--bf16" in options else 1, num_layers=4)
    flags = layout.flags(5, f"--train-iters {STEPS} {options}")
    results = ranks.run(layout.num_ranks, train_and_wait_for_the_plan, flags, timeout=120)
    outcomes = [outcomes for outcomes, _ in results]
    if options == ON_A_V:
        assert_same_model(outcomes, SCHEDULES, layout, STEPS)
    else:
        assert_same_bits(outcomes, SCHEDULES, STEPS)
    assert set(results[0][1]) == {"switched to the planned schedule: zb-auto"}  # twice, where the times have drifted
    assert all(said == [] for _, said in results[1:]), "one rank plans for all"
