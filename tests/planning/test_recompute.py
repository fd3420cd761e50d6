"""Plans with recomputation as a pass of its own: of a search, of a run, of advice, and where they are refused."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from megatron.zero_bubble.core.analysis.memory import peaks_in_order
from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Kind, Placement, Schedule
from megatron.zero_bubble.core.schedules import build
from megatron.zero_bubble.core.search.recompute import with_recomputation
from megatron.zero_bubble.planning.answer import answer
from megatron.zero_bubble.planning.feasibility import ANY_RUN
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.job.runnable import check_trainable
from megatron.zero_bubble.planning.question import asked, of_run
from megatron.zero_bubble.planning.setup import Named, Searched, Setup
from megatron.zero_bubble.planning.source import ScheduleSource
from tests.cli.test_advise import SMALL, Capture, advice, check_rows
from tests.helpers.rows import some

EFFORT = 0.1
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()


def figures(num_ranks: int = 4, num_microbatches: int = 8, seed: int | None = None) -> Figures:
    """F = R = B = W, or random times of stages; R keeps three times what F does, and W as much as both."""
    generator = random.Random(seed)
    times = [tuple(1.0 if seed is None else generator.uniform(0.5, 2) for _ in range(num_ranks)) for _ in range(4)]

    def on(placement: Placement) -> tuple[PassCosts, PassMemory]:
        forward, backward, wgrad, again = times
        both = tuple(b + r for b, r in zip(backward, again, strict=True))
        line = PassCosts(forward, both, wgrad, recompute_ms=again)
        kept = PassMemory(*((size,) * num_ranks for size in (1.0, 2.0)), rebuilt=(3.0,) * num_ranks)
        return line.fit(placement), kept.fit(placement)

    return Figures(num_ranks, num_microbatches, on, memory_given=True)


def ways(schedule: Schedule) -> set[str]:
    return {p.kind.value for p in schedule.passes()}


@pytest.mark.parametrize(("seed", "limit"), some(product(range(20), ("1.5p", "3p")), (0, "1.5p")))
def test_a_search_is_within_its_limit_and_its_bound(seed: int, limit: str) -> None:
    """It is not longer than the named schedules within the limit, with R before every backward."""
    costs = figures(seed=seed)
    found = answer(replace(asked(Setup(Searched("linear"), early_recompute=True), costs, limit), effort=EFFORT))
    assert Kind.R.value in ways(found.schedule)
    passes, memory = costs.of_ranks
    most = costs.limit(limit)
    assert max(peaks_in_order(found.schedule, memory)) <= most + 1e-9
    assert found.certificate is not None and found.certificate.bound.value_ms <= found.timeline.makespan_ms + 1e-9
    for name in ("1f1b", "zb-h1"):
        known = with_recomputation(costs.build(name))
        if max(peaks_in_order(known, memory)) <= most:
            assert found.timeline.makespan_ms <= simulate(known, passes).makespan_ms + 1e-9


@pytest.mark.parametrize(
    "order", [Named("zb-h1"), Named("zb-v"), Searched("linear"), Searched("loop"), Searched("wave")]
)
def test_every_backward_of_a_job_has_one(order: Named | Searched) -> None:
    schedule = ScheduleSource.of(Setup(order, early_recompute=True), 4).make(8)
    backwards = [p for p in schedule.passes() if p.kind in (Kind.B, Kind.BW)]
    assert schedule.recomputed == {(p.stage, p.microbatch, p.slice) for p in backwards}
    assert not ScheduleSource.of(Setup(order), 4).make(8).recomputed


def test_slices_are_computed_again_in_the_order_of_their_backwards() -> None:
    check_trainable(with_recomputation(build("seq-zb-h1", num_ranks=2, num_microbatches=3)))


def test_a_run_plans_with_what_it_has_measured() -> None:
    """1F1B that computes again within B takes 4 (8 + 4 - 1) = 44."""
    costs = figures(4, 8)
    early = Setup(Searched("linear", limit="3p"), early_recompute=True)
    questions = [of_run(costs, setup, ANY_RUN) for setup in (early, replace(early, early_recompute=False))]
    with_r, without = (answer(replace(question, effort=EFFORT)) for question in questions)
    assert with_r.schedule.recomputed and not without.schedule.recomputed
    assert with_r.timeline.makespan_ms <= 0.8 * 44 < without.timeline.makespan_ms


def test_costs_without_it_are_refused() -> None:
    costs = Figures(2, 2, lambda on: (PassCosts.uniform(on, 1, 1, 1), PassMemory.uniform(on)))
    with pytest.raises(UserError, match="needs a job that recomputes whole layers; got costs without its time"):
        answer(asked(Setup(Named("zb-h1"), early_recompute=True), costs))


def test_advice_offers_it_to_jobs_that_recompute_whole_layers(capsys: Capture) -> None:
    own = ["--nodes", "1", "--gpus-per-node", "4", "--gpu", "h100"]
    found = advice(capsys, [*SMALL, *FULL], *own, "--quick")
    (row,) = (row for row in found["advice"] if "only the order changes" in row["best_at"])
    assert row["name"].endswith(" with R") and row["flags"][-2:] == ["--zero-bubble-recompute", "early"]
    assert row["bits"] == "those of the job as it is, bit for bit with --zero-bubble-exact"
    check_rows(capsys, found, [*SMALL, *FULL], *own)
