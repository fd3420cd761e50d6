"""No rank blocks another by loading a kernel, which may wait until the GPU is idle, on simulated GPUs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from megatron.zero_bubble import SCHEDULES, build
from megatron.zero_bubble.core.ir import Pass, Plan
from megatron.zero_bubble.core.plan import Additions, plan_of, plan_of_evaluation
from megatron.zero_bubble.core.plan.communicate import PostReceives
from megatron.zero_bubble.core.plan.shard import Sharding
from megatron.zero_bubble.integration.adapter.staging import Staging, steps_of
from megatron.zero_bubble.planning.source import fused_but_last
from tests.helpers.nccl_loading import Kernels, Turn, all_end, always_new, by_kind, by_stage
from tests.helpers.rows import some
from tests.helpers.sources import named

WITH_VOCABULARY = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min")
RECEIVES: tuple[PostReceives, ...] = ("early", "late")


def loaded(_step: Pass | str) -> None:
    """All kernels are loaded."""


def undoing(step: Pass | str) -> Hashable:
    """All kernels are loaded except those that undo an optimizer step."""
    return step if step == "undo" else None


@dataclass(frozen=True)
class Run:
    """An iteration of a kind."""

    kind: str
    plan: Plan

    @property
    def rejects(self) -> bool:
        return self.kind == "post-validation"

    def ends(self, kernels: Kernels, staged: bool = False, waits_for_passes: bool = False) -> bool:
        turn = Turn(self.plan, self.kind == "evaluation", staged, self.rejects)
        return all_end([turn], kernels, 2 if self.kind == "shards" else 1, waits_for_passes)


def runs(name: str, sizes: Iterable[tuple[int, int]], receives: Sequence[PostReceives] = RECEIVES) -> Iterator[Run]:
    """Yield the iterations of a schedule with these numbers of ranks and microbatches."""
    for p, m in sizes:
        schedule = build(name, num_ranks=p, num_microbatches=m)
        for post in receives:
            yield Run("training", plan_of(schedule, Additions(post)))
            yield Run("evaluation", plan_of_evaluation(schedule, Additions(post)))
            yield Run("post-validation", plan_of(schedule, Additions(post, post_validation=True)))
            yield Run("shards", plan_of(schedule, Additions(post, sharding=Sharding(2))))


def vocabulary_runs(name: str, sizes: Iterable[tuple[int, int]]) -> Iterator[Run]:
    """The same with vocabulary parallelism."""
    for p, m in sizes:
        for algorithm in (1, 2):
            schedule = named(name, p, vocabulary=algorithm).make(m)
            for post in RECEIVES:
                yield Run("training", plan_of(schedule, Additions(post)))
                yield Run("evaluation", plan_of_evaluation(schedule, Additions(post)))
                yield Run("post-validation", plan_of(schedule, Additions(post, post_validation=True)))


def blocked(found: Iterable[Run], kernels: Kernels, **rules: bool) -> list[str]:
    return [f"{run.kind}: {run.plan.schedule}" for run in found if not run.ends(kernels, **rules)]


def many(num_ranks: Iterable[int]) -> list[tuple[int, int]]:
    """Numbers of ranks and of microbatches."""
    return [(p, m) for p in num_ranks for m in sorted({1, p, 2 * p + 1, 3 * p})]


@pytest.mark.parametrize(
    ("name", "receives", "kernels", "count"),
    [
        ("zb-h1", "early", by_stage, 0),
        ("zb-v", "late", by_stage, 0),
        ("v-half", "early", by_kind, 3),
        ("v-half", "late", by_kind, 5),
        ("v-min", "early", by_stage, 5),
        ("dualpipe-v", "late", by_kind, 0),
        ("dualpipe-v", "late", by_stage, 4),
    ],
)
def test_ranks_block_each_other_at_first_launches(
    name: str, receives: PostReceives, kernels: Kernels, count: int
) -> None:
    sizes = [(p, n * p) for p in (2, 4) for n in (1, 2, 3)]
    found = [run for run in runs(name, sizes, (receives,)) if run.kind == "training"]
    assert (len(blocked(found, kernels)), blocked(found, loaded)) == (count, [])


@pytest.mark.parametrize("name", WITH_VOCABULARY)
def test_no_first_launch_ends_with_vocabulary_parallelism(name: str) -> None:
    """Ranks start to receive broadcasts before their first pass."""
    found = list(vocabulary_runs(name, [(2, 3)]))
    assert (len(blocked(found, by_kind)), blocked(found, loaded)) == (len(found), [])


@pytest.mark.parametrize("name", some(SCHEDULES, *list(SCHEDULES)[::3]))
def test_no_rank_blocks_another_where_messages_are_staged(name: str) -> None:
    """Whatever kernels are loaded already."""
    assert blocked(runs(name, [(2, 1), (3, 4)]), always_new, staged=True) == []


@pytest.mark.parametrize("name", WITH_VOCABULARY)
def test_no_rank_blocks_another_where_the_collectives_of_vocabularies_are_staged(name: str) -> None:
    assert blocked(vocabulary_runs(name, [(2, 3)]), always_new, staged=True) == []


class Choice(Staging):
    """The choice between messages that are staged and others, without process groups."""

    def __init__(self) -> None:
        self._links: Any = True
        self._done: set[Hashable] = set()

    def turn(self, plan: Plan, forward_only: bool = False) -> Turn:
        usual: Any = False
        return Turn(plan, forward_only, bool(self.of(steps_of(plan, forward_only, ()), usual)))


def job(name: str, p: int, post: PostReceives) -> list[Turn]:
    """Iterations of a job that changes its batch size and fuses backwards, every second of which is an evaluation."""
    small, large = (build(name, num_ranks=p, num_microbatches=m) for m in (1, p + 1))
    choice, turns = Choice(), []
    for schedule in (large, small, large, fused_but_last(large), small):
        turns.append(choice.turn(plan_of(schedule, Additions(post))))
        turns.append(choice.turn(plan_of_evaluation(schedule, Additions(post)), forward_only=True))
    return turns


@pytest.mark.parametrize("name", some(SCHEDULES, *list(SCHEDULES)[2::3]))
def test_no_rank_blocks_another_in_any_iteration_of_a_job(name: str) -> None:
    """Hosts run ahead into iterations that are not staged while others load kernels in one that is."""
    turns = job(name, 3, "early")
    assert all_end(turns, by_stage)
    assert 2 <= sum(turn.staged for turn in turns) <= 3, "staged iterations are slow"


@pytest.mark.parametrize("name", ["v-half", "v-min"])
def test_jobs_block_where_no_iteration_is_staged(name: str) -> None:
    assert not all_end([replace(turn, staged=False) for turn in job(name, 3, "early")], by_stage)


@pytest.mark.parametrize("name", ["interleaved-1f1b", "zb-v", "v-half"])
def test_no_rank_blocks_another_by_the_first_undoing(name: str) -> None:
    """It runs when the messages are drained, at any iteration; before that, ranks would block each other."""
    found = [run for run in runs(name, many((2, 3))) if run.rejects]
    assert found and blocked(found, undoing) == []


@pytest.mark.parametrize("name", ["zb-h1", "v-half"])
def test_no_rank_blocks_another_by_the_first_undoing_with_vocabulary_parallelism(name: str) -> None:
    found = [run for run in vocabulary_runs(name, [(2, 3), (3, 3)]) if run.rejects]
    assert found and blocked(found, undoing) == []


@pytest.mark.parametrize("name", some(SCHEDULES, *list(SCHEDULES)[1::3]))
def test_no_rank_blocks_another_by_shrinking_a_segment(name: str) -> None:
    """With expandable segments, the allocator waits only for the stream of the passes."""
    assert blocked(runs(name, [(3, 4)]), always_new, waits_for_passes=True) == []


@pytest.mark.full
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_rank_blocks_another_with_up_to_eight_ranks(name: str) -> None:
    assert blocked(runs(name, many(range(2, 9))), always_new, staged=True) == []


@pytest.mark.full
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("post", RECEIVES)
def test_no_rank_blocks_another_in_jobs_with_up_to_eight_ranks(name: str, post: PostReceives) -> None:
    assert [p for p in range(2, 9) if not all_end(job(name, p, post), by_stage)] == []


@pytest.mark.full
@pytest.mark.parametrize("name", WITH_VOCABULARY)
def test_no_rank_blocks_another_with_up_to_eight_shards_of_a_vocabulary(name: str) -> None:
    assert blocked(vocabulary_runs(name, many(range(2, 9))), always_new, staged=True) == []
