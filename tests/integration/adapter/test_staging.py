"""The first iteration that does something new is staged in host memory, and has the same bits as any other."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any
from unittest import mock

import pytest

from megatron.zero_bubble import build
from megatron.zero_bubble.core.ir import WHOLE, Pass
from megatron.zero_bubble.core.plan import plan_of, plan_of_evaluation
from megatron.zero_bubble.core.plan.offload import Move
from megatron.zero_bubble.engine.optimizer.post_validation import PostValidatedOptimizer
from megatron.zero_bubble.engine.runtime.transport import Receive, Transport
from megatron.zero_bubble.integration.adapter import connection
from megatron.zero_bubble.integration.adapter.staging import Carriers, Staging, spins, steps_of
from megatron.zero_bubble.planning.source import fused_but_last
from tests.helpers.faults import Fault, train_with_faults
from tests.helpers.parity import Layout, Outcome, assert_same_bits, train
from tests.helpers.ranks import RankPool

SHARDS = "--zero-bubble-shard-weights --zero-bubble-unit-microbatches 2 --use-distributed-optimizer"

Found = tuple[list[Outcome], list[int]]


def train_staging(rank: int, flags: str, schedules: Sequence[str | None]) -> Found:
    """Train as if gloo were a backend whose messages spin; also return which iterations were staged."""
    staged: list[int] = []

    class Recorded(Staging):
        def of(self, steps: Collection[Hashable], usual: Carriers) -> Carriers:
            links = super().of(steps, usual)
            staged.append(int(links is not usual))
            assert (links.transport is usual.transport) is (links.lanes is usual.lanes) is (links is usual)
            return links

    with mock.patch.multiple(connection, spins=lambda _backend: True, Staging=Recorded):
        return train(rank, flags, schedules), staged


@pytest.mark.parametrize(
    ("layout", "options", "schedule", "staged"),
    [
        (Layout(2), "--bf16", "zb-h1", [1, 0, 0, 1, 0, 0]),
        (Layout(3), "--clip-grad 100 --zero-bubble-post-validation", "zb-h2", [1, 0, 1, 1, 0, 0]),
        (Layout(2, data=2), "--rampup-batch-size 4 4 12 --zero-bubble-post-receives late", "zb-h1", [1, 0, 0, 1, 0, 0]),
    ],
    ids=["bf16", "the third iteration is the first that validates a step", "m grows, late receives"],
)
def test_same_bits_as_stock(ranks: RankPool, layout: Layout, options: str, schedule: str, staged: list[int]) -> None:
    """Three steps, an evaluation, and two steps."""
    schedules = [None, schedule]
    found = ranks.run(layout.num_ranks, train_staging, layout.flags(3, options), schedules, timeout=120)
    assert_same_bits([outcomes for outcomes, _ in found], schedules)
    assert [own for _, own in found] == [staged] * layout.num_ranks


@pytest.mark.parametrize(
    ("layout", "schedule"),
    [
        (Layout(2, num_layers=4), "zb-v"),
        (Layout(3), "--zero-bubble-schedule zb-h1 --zero-bubble-vocabulary-parallel 2"),
        (Layout(2, data=2, num_layers=4), f"--zero-bubble-schedule zero-pp {SHARDS}"),
    ],
    ids=["two stages per rank", "vocabulary", "shards"],
)
def test_same_bits_as_without(ranks: RankPool, layout: Layout, schedule: str) -> None:
    flags = layout.flags(3, "--untie-embeddings-and-output-weights")
    found = ranks.run(layout.num_ranks, train_staging, flags, [schedule], timeout=120)
    assert [staged for _, staged in found] == [[1, 0, 0, 1, 0, 0]] * layout.num_ranks
    assert [outcomes for outcomes, _ in found] == ranks.run(layout.num_ranks, train, flags, [schedule], timeout=120)


def under_way_when_undone(rank: int, flags: str, faults: Sequence[Fault]) -> list[int]:
    """Train; return the number of messages that were under way on this rank whenever it undid a step."""
    under_way, found = [0], []

    def counting(by: int, function: Any) -> Any:
        def counted(*arguments: Any) -> Any:
            under_way[0] += by
            return function(*arguments)

        return counted

    undo = PostValidatedOptimizer._undo

    def undone(*arguments: Any, **options: Any) -> None:
        found.append(under_way[0])
        undo(*arguments, **options)

    with (
        mock.patch.multiple(
            Transport,
            send=counting(1, Transport.send),
            settle=counting(-1, Transport.settle),
            post=counting(1, Transport.post),
        ),
        mock.patch.object(Receive, "wait", counting(-1, Receive.wait)),
        mock.patch.object(PostValidatedOptimizer, "_undo", undone),
    ):
        train_with_faults(rank, flags, [""], faults, daring=True)
    assert under_way == [0]
    return found


def test_steps_are_undone_when_messages_are_drained(ranks: RankPool) -> None:
    """The first undoing loads kernels, in an iteration that is not staged. Rank 1 has waited and undoes nothing."""
    flags = Layout(2, num_layers=4).flags(4, "--zero-bubble-schedule zb-v --clip-grad 100 --train-iters 7")
    faults = [Fault(5, 1, 2, 1e6)]
    found = ranks.run(2, under_way_when_undone, f"{flags} --zero-bubble-post-validation", faults, timeout=120)
    assert found == [[0], []]


def steps(name: str, num_microbatches: int = 4, forward_only: bool = False) -> frozenset[Hashable]:
    schedule = build(name, num_ranks=2, num_microbatches=num_microbatches)
    lower = plan_of_evaluation if forward_only else plan_of
    return steps_of(lower(schedule), forward_only, ())


def test_other_numbers_of_microbatches_are_nothing_new() -> None:
    assert steps("zb-h1") == steps("zb-h1", 40) == steps("zb-h2", 7)
    assert not steps("zb-h1") & steps("zb-h1", forward_only=True) - {WHOLE}


def test_other_passes_are_new() -> None:
    """As after a switch of ``zb-auto``: a fused backward, or the gradients of a divided vocabulary."""
    schedule = build("zb-h1", num_ranks=2, num_microbatches=4)
    fused = steps_of(plan_of(fused_but_last(schedule)), False, ())
    assert fused - steps("zb-h1")
    assert steps("1f1b") - steps("zb-h1")


def test_other_moves_and_slices_are_new() -> None:
    schedule = build("zb-h1", num_ranks=2, num_microbatches=4)
    plan = plan_of(schedule)
    one, two = (steps_of(plan, False, [Move(Pass.parse("0F0")), Move(Pass.parse("0F1"))][:n]) for n in (1, 2))
    assert steps("zb-h1") < one < two
    assert steps("seq-zb-h1") - steps("zb-h1")


def test_messages_of_nccl_spin() -> None:
    assert [backend for backend in ("nccl", "gloo") if spins(backend)] == ["nccl"]
