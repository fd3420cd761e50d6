"""Tests of ``zb-auto`` in training: it measures, plans in the background and switches without changing any result."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.ir import Kind, Slices
from megatron.zero_bubble.core.schedules import build
from megatron.zero_bubble.engine.runtime.observer import IterationStart, observed
from megatron.zero_bubble.integration.adapter.planner import Planner
from megatron.zero_bubble.planning.cuts import slices_of
from megatron.zero_bubble.planning.setup import Searched, Setup
from megatron.zero_bubble.planning.worker import Request
from tests.helpers.parity import Layout, Outcome, assert_same_bits, assert_same_model, train
from tests.helpers.ranks import RankPool
from tests.helpers.rows import some
from tests.helpers.slices import LONG
from tests.helpers.sources import cuts
from tests.integration.adapter.test_placements import TWO
from tests.integration.adapter.test_slices_training import values

GIB = float(2**30)
STEPS = 14  # two warm-up, four measured, the switch, and four measured with the plan
FEW_STEPS = 10  # two warm-up, four measured, the switch, and some with the plan
SCHEDULES = [None, "zb-auto"]


@contextmanager
def waiting_for_plans() -> Iterator[list[str]]:
    """Context in which training waits for the planner at the first query; yields the planner's messages so far."""
    finished, result, said = Planner.finished, Planner.result, []

    def waited_for(self: Planner) -> bool:
        if self._process is not None:
            self._process.wait()
        return finished(self)

    def heard(self: Planner) -> object:
        schedule, text = result(self)
        if schedule is not None:
            fused = ", fused backwards" if any(p.kind is Kind.BW for p in schedule.passes()) else ""
            early = ", with R" if schedule.recomputed else ""
            text = f"{text}: {schedule.name}, {schedule.num_slices} slices{fused}{early}"
        said.append(text)
        return schedule, text

    Planner.finished, Planner.result = waited_for, heard
    try:
        yield said
    finally:
        Planner.finished, Planner.result = finished, result


def train_and_wait_for_the_plan(
    rank: int, flags: str, schedules: Sequence[str | None] = tuple(SCHEDULES)
) -> tuple[list[Outcome], list[str]]:
    """Train; return the outcomes and the planner's messages."""
    with waiting_for_plans() as said:
        return train(rank, flags, schedules), said


ON_A_V = "--zero-bubble-placement vee"
IN_A_WAVE = "--zero-bubble-placement wave"
DISTRIBUTED = "--bf16 --overlap-grad-reduce --use-distributed-optimizer --ddp-bucket-size 1000"


@pytest.mark.parametrize("options", some(["", ON_A_V, DISTRIBUTED], DISTRIBUTED))
def test_switching_schedules_changes_no_bit(ranks: RankPool, options: str) -> None:
    layout = Layout(2, data=2 if "--bf16" in options else 1, num_layers=4)
    flags = layout.flags(5, f"--train-iters {STEPS} {options}")
    results = ranks.run(layout.num_ranks, train_and_wait_for_the_plan, flags, timeout=120)
    outcomes = [outcomes for outcomes, _ in results]
    if options == ON_A_V:
        assert_same_model(outcomes, SCHEDULES, layout, STEPS)
    else:
        assert_same_bits(outcomes, SCHEDULES, STEPS)
    assert set(results[0][1]) == {
        "switched to the planned schedule: zb-auto, 1 slices"
    }  # printed twice if the times have drifted
    assert all(said == [] for _, said in results[1:]), "only rank 0 plans"


LOOPS = {
    "v of the job": (f"{TWO}", "loop", 4),
    "v of the flag": ("", "loop --zero-bubble-num-chunks 4", 8),
    "v=4 of the job": ("--num-virtual-stages-per-pipeline-rank 4", "loop", 8),
    "W": ("", "wave", 8),
    "six in a wave": ("", "wave --zero-bubble-num-chunks 6", 12),
}


@pytest.mark.parametrize("name", some(LOOPS, "W"))
def test_plans_on_loops_and_waves_change_no_bit(ranks: RankPool, name: str) -> None:
    """A loop has the placement of stock's virtual pipeline, so that everything is equal; a job without it has 1F1B."""
    job, placement, num_layers = LOOPS[name]
    layout, schedules = Layout(2, num_layers=num_layers), [None, f"zb-auto --zero-bubble-placement {placement}"]
    flags = layout.flags(4, f"--train-iters {FEW_STEPS} {job}")
    results = ranks.run(2, train_and_wait_for_the_plan, flags, schedules, timeout=120)
    outcomes = [outcomes for outcomes, _ in results]
    if job:
        assert_same_bits(outcomes, schedules, FEW_STEPS)
    else:
        assert_same_model(outcomes, schedules, layout, FEW_STEPS)
    assert set(results[0][1]) == {"switched to the planned schedule: zb-auto, 1 slices"}


@pytest.mark.full  # by default, test_recompute.py has such a plan with R
@pytest.mark.parametrize("options", ["--zero-bubble-memory-limit 1.01p", ON_A_V])
def test_plans_with_fused_backwards_change_no_bit(ranks: RankPool, options: str) -> None:
    """With full recomputation, W needs many times what F has saved, so the plan fuses backwards."""
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    layout = Layout(2, num_layers=4)
    flags = layout.flags(5, f"--train-iters {FEW_STEPS} --zero-bubble-exact {recompute} {options}")
    results = ranks.run(2, train_and_wait_for_the_plan, flags, timeout=120)
    outcomes = [outcomes for outcomes, _ in results]
    if options == ON_A_V:
        assert_same_model(outcomes, SCHEDULES, layout, FEW_STEPS)
    else:
        assert_same_bits(outcomes, SCHEDULES, FEW_STEPS)
    assert set(results[0][1]) == {"switched to the planned schedule: zb-auto, 1 slices, fused backwards"}


@pytest.mark.parametrize(
    "cuts",
    [
        pytest.param("--zero-bubble-num-slices 4", marks=pytest.mark.full),
        pytest.param(f"--zero-bubble-num-slices 4 {ON_A_V} --zero-bubble-memory-limit 0.9p", marks=pytest.mark.full),
        "--zero-bubble-slice-ends 20,34,42,48",
        pytest.param("--zero-bubble-num-slices 4 --zero-bubble-placement loop", marks=pytest.mark.full),
        pytest.param(f"--zero-bubble-num-slices 4 {IN_A_WAVE}", marks=pytest.mark.full),
    ],
)
def test_schedules_of_slices_are_searched_for(ranks: RankPool, cuts: str) -> None:
    schedules = [None, f"zb-auto {cuts}"]
    flags = Layout(2, num_layers=8 if "wave" in cuts else 4).flags(3, f"{LONG} --train-iters {FEW_STEPS}")
    results = ranks.run(2, train_and_wait_for_the_plan, flags, schedules, timeout=120)
    assert set(results[0][1]) == {"switched to the planned schedule: zb-auto, 4 slices"}
    stock, sliced = results[-1][0]
    assert len(values(stock.losses)) > FEW_STEPS
    assert values(sliced.losses) == pytest.approx(values(stock.losses), rel=1e-5)
    assert values(sliced.grad_norms) == pytest.approx(values(stock.grad_norms), rel=1e-4)


@pytest.mark.parametrize(
    ("options", "first"),
    [
        ("2 --zero-bubble-memory-limit 1.5p", None),
        pytest.param(f"1 {ON_A_V} --zero-bubble-recompute logits", "zb-v", marks=pytest.mark.full),
        pytest.param("2 --zero-bubble-placement loop", "zb-interleaved", marks=pytest.mark.full),
        pytest.param(f"1 {IN_A_WAVE}", f"zb-auto {IN_A_WAVE}", marks=pytest.mark.full),
    ],
)
def test_schedules_with_a_divided_vocabulary_are_searched_for(ranks: RankPool, options: str, first: str | None) -> None:
    """Costs are measured with the passes of the vocabulary, and the losses are those of whole layers up to rounding."""
    auto = f"zb-auto --zero-bubble-vocabulary-parallel {options}"
    flags = Layout(2, num_layers=8 if "wave" in options else 4).flags(3, f"--train-iters {FEW_STEPS}")
    results = ranks.run(2, train_and_wait_for_the_plan, flags, [first, auto], timeout=200)
    algorithm = options.split(maxsplit=1)[0]
    switched = {f"switched to the planned schedule: zb-auto (vocabulary {algorithm}), 1 slices"}
    assert set(results[0][1]) - {"switched to the planned schedule: zb-auto, 1 slices"} == switched
    for (whole, divided), _ in results:
        assert len(values(divided.grad_norms)) >= FEW_STEPS
        assert values(divided.losses) == pytest.approx(values(whole.losses), rel=5e-7)
        assert values(divided.grad_norms) == pytest.approx(values(whole.grad_norms), rel=1e-6)


def slices_measured_and_planned(rank: int, slices: Slices) -> list[Slices]:
    """Return the cuts of the first schedule, then those of the request to the planner."""
    from megatron.zero_bubble.integration.adapter import auto, measured

    found = []

    def trace(name: str, marks: Any, group: Any) -> Any:
        found.append(schedule.make(2, 3).slices)
        return SimpleNamespace(timeline=simulate(schedule.make(2, 3), PassCosts((1.0, 1.0), (1.0, 1.0), (1.0, 1.0))))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured, "gather_trace", trace)
        patch.setattr(auto, "Planner", lambda request: found.append(slices_of(request.setup.cuts)))
        passes: Any = SimpleNamespace(start=lambda group: None, stop=lambda: None)
        memory: Any = SimpleNamespace(gather=lambda group: PassMemory((GIB, GIB), (GIB, GIB)))
        options = auto.AutoOptions(Setup(Searched(), cuts=cuts(slices)), warm_up=0, measured=1)
        schedule = auto.AutoSchedule(options, memory, lambda line: None)
        assert torch.distributed.group.WORLD is not None
        with observed(measured.Measured(passes, [schedule]), IterationStart(torch.distributed.group.WORLD, 3)):
            pass
    return found


def test_uneven_slices_are_measured_and_planned_as_they_are_cut(ranks: RankPool) -> None:
    slices = Slices((0.75, 0.25))
    assert ranks.run(2, slices_measured_and_planned, slices) == [[slices, slices], [slices]]


def train_without_a_planner(rank: int, flags: str, missing: str) -> tuple[list[Outcome], list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        if missing == "an interpreter":
            patch.setattr(sys, "executable", "/nowhere/python")
        else:
            patch.setattr(tempfile, "tempdir", "/nowhere")
        return train_and_wait_for_the_plan(rank, flags)


@pytest.mark.parametrize("missing", ["an interpreter", "a folder for temporary files"])
def test_failing_planner_keeps_the_schedule(ranks: RankPool, missing: str) -> None:
    flags = Layout(2).flags(4, f"--train-iters {FEW_STEPS}")
    results = ranks.run(2, train_without_a_planner, flags, missing, timeout=120)
    assert_same_bits([outcomes for outcomes, _ in results], SCHEDULES, FEW_STEPS)
    said = results[0][1]
    assert len(said) == 1, "planning for this batch size must not be repeated"
    assert said[0].startswith("no plan, the schedule stays as it is: [Errno 2] No such file or directory: ")


def sizes_planned_for(
    rank: int, sizes: list[int], hopeless: list[int], group: Any = None, options: dict[str, Any] | None = None
) -> list[int]:
    """Return the numbers of microbatches for which a planner is started; those in ``hopeless`` have no plan.

    Args:
        group: the pipeline, if the lengths of microbatches vary.
    """
    from megatron.zero_bubble.integration.adapter import auto, measured

    now, asked = sizes[0], []

    class Planner:
        limit = None

        def __init__(self, request: Request) -> None:
            self.size = request.num_microbatches
            asked.append(self.size)

        def finished(self) -> bool:
            return True

        def result(self) -> tuple[Any, str]:
            return (None if self.size in hopeless else made(self.size)), ""

    def made(num_microbatches: int) -> Any:
        return build("zb-h1", num_ranks=2, num_microbatches=num_microbatches)

    def trace(*_: Any) -> Any:
        return SimpleNamespace(timeline=simulate(made(now), PassCosts((1.0, 1.0), (1.0, 1.0), (1.0, 1.0))))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "Planner", Planner)
        patch.setattr(measured, "gather_trace", trace)
        passes: Any = SimpleNamespace(start=lambda group: None, stop=lambda: None)
        memory: Any = SimpleNamespace(gather=lambda group: PassMemory((GIB, GIB), (GIB, GIB)))
        own: dict[str, Any] = {"setup": Setup(Searched()), "warm_up": 0, "measured": 1, **(options or {})}
        schedule = auto.AutoSchedule(auto.AutoOptions(**own), memory, lambda line: None)
        observer = measured.Measured(passes, [schedule])
        for now in sizes:
            start = IterationStart(group or torch.distributed.group.WORLD, now, varies=group is not None)
            with observed(observer, start):
                pass
    return asked


def test_batch_size_without_a_plan_does_not_block_the_next(ranks: RankPool) -> None:
    """The batch grows while the planner is running."""
    assert ranks.run(2, sizes_planned_for, [4, 6, 6, 6], [4]) == [[4, 6], []]
    assert ranks.run(2, sizes_planned_for, [4, 6, 6, 6, 4, 4, 4], [4, 6]) == [[4, 6], []], (
        "each size must be tried once"
    )


def schedules_run(
    rank: int, plan_takes: float, keep_faster: bool, limit: str = "1p"
) -> tuple[list[str], list[str], list[bool]]:
    """The name of the schedule of each of six iterations, what is logged, and whether the schedule is settled then.

    Args:
        plan_takes: the measured time of a pass in the planned schedule, in those of the one before it.
        limit: of memory.
    """
    from megatron.zero_bubble.integration.adapter import auto, measured

    planned = build("zb-h2", num_ranks=2, num_microbatches=4)
    said: list[str] = []
    names: list[str] = []
    settled: list[bool] = []

    class Planner:
        limit = None

        def __init__(self, _: Request) -> None:
            pass

        def finished(self) -> bool:
            return True

        def result(self) -> tuple[Any, str]:
            return planned, "switched"

    def trace(*_: Any) -> Any:
        own = schedule.make(2, 4)
        ms = (plan_takes if own.name == planned.name else 1.0,) * 2
        return SimpleNamespace(timeline=simulate(own, PassCosts(ms, ms, ms)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "Planner", Planner)
        patch.setattr(measured, "gather_trace", trace)
        passes: Any = SimpleNamespace(start=lambda group: None, stop=lambda: None)
        memory: Any = SimpleNamespace(gather=lambda group: PassMemory((GIB, GIB), (GIB, GIB)))
        options = auto.AutoOptions(Setup(Searched(limit=limit, keep_faster=keep_faster)), warm_up=0, measured=1)
        schedule = auto.AutoSchedule(options, memory, said.append)
        observer = measured.Measured(passes, [schedule])
        for _ in range(6):
            with observed(observer, IterationStart(torch.distributed.group.WORLD, 4)):
                names.append(schedule.make(2, 4).name)
                settled.append(schedule.is_settled())
    return names, said, settled


def test_a_plan_that_proves_slower_is_given_up_if_asked(ranks: RankPool) -> None:
    for plan_takes, keep_faster, last in ((1.5, True, "1f1b"), (1.5, False, "zb-h2"), (0.95, True, "zb-h2")):
        results = ranks.run(2, schedules_run, plan_takes, keep_faster)
        first = "1f1b" if keep_faster else "zb-h1"
        assert [names[0] for names, _, _ in results] == [first] * 2
        assert "zb-h2" in results[0][0] and [names[-1] for names, _, _ in results] == [last] * 2
        settled = [of_rank for _, _, of_rank in results]
        assert settled[0] == settled[1], "CUDA graphs begin on all ranks"
        if (plan_takes, keep_faster) != (1.5, False):  # which is planned for again
            assert settled[0] == [False] * 3 + [True] * 3
        said = " ".join(results[0][1])
        assert ("back to 1f1b, because" in said) is (last == "1f1b")
        assert ("to keep this plan: record costs" in said) is (last == "zb-h2")
        assert not results[1][1], "rank 0 logs"


def test_no_schedule_above_the_limit_is_gone_back_to(ranks: RankPool) -> None:
    (names, said, _), _ = ranks.run(2, schedules_run, 1.5, True, "1.5GiB")
    assert names[0] == "1f1b" and names[-1] == "zb-h2"
    kept = "19.5 ms, and 1f1b 14.0 ms (+39.3%), which is above the limit of 1.5GiB; its activations"
    assert any(kept in line for line in said), said


def test_a_limit_below_that_of_1f1b_holds_from_the_first_iteration_on(ranks: RankPool) -> None:
    (names, _, _), _ = ranks.run(2, schedules_run, 0.95, True, "0.5p")
    assert names[0] == "zb-auto" and names[-1] == "zb-h2"
