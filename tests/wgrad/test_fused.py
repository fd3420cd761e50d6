"""Fused weight gradients: near the exact run, equal among schedules, and reduced while the tail still computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from megatron.zero_bubble import Kind, Pass, Schedule, build
from tests.helpers.parity import Layout, Outcome, assert_same_bits, train
from tests.helpers.ranks import RankPool

FUSED = "--zero-bubble-fuse-wgrad"
OVERLAP = "--overlap-grad-reduce --no-align-grad-reduce --ddp-bucket-size 1000"

ROWS = {
    "fp32, bias, tied": (Layout(2), 3, "", 1e-5),
    "bf16, distributed optimizer, both overlaps": (
        Layout(2, data=2),
        3,
        f"--bf16 --use-distributed-optimizer --overlap-param-gather {OVERLAP}",
        2e-2,
    ),
    "fp16, tp=2 and sequence parallel": (
        Layout(2, tensor=2),
        3,
        "--fp16 --loss-scale 128 --sequence-parallel --untie-embeddings-and-output-weights",
        5e-3,
    ),
    "experts, overlap": (
        Layout(2, data=2),
        3,
        f"--num-experts 4 --moe-aux-loss-coeff 0.01 --swiglu --disable-bias-linear --bf16 {OVERLAP}",
        2e-2,
    ),
    "bf16 gradients": (Layout(2, data=2), 3, "--bf16 --grad-reduce-in-bf16", 2e-2),
}
"""Layout, microbatches, flags, and how far a loss or a norm may be from stock's after five steps, relative."""


def figures(noted: Sequence[str]) -> list[float]:
    """Losses or norms; those of an evaluation stand behind the name of its split."""
    return [float.fromhex(text) for text in (words.split()[-1] for words in noted) if text != "None"]


@pytest.mark.parametrize("layout, num_microbatches, options, tolerance", ROWS.values(), ids=ROWS)
def test_near_stock_and_equal_among_schedules(
    ranks: RankPool, layout: Layout, num_microbatches: int, options: str, tolerance: float
) -> None:
    flags = layout.flags(num_microbatches, f"{options} {FUSED}")
    schedules = [None, "zb-h1", "zb-h2"]
    results = ranks.run(layout.num_ranks, train, flags, schedules, timeout=200)
    assert_same_bits([outcomes[1:] for outcomes in results], schedules[1:])
    for stock, fused, _ in results:
        for own, expected in ((fused.losses, stock.losses), (fused.grad_norms, stock.grad_norms)):
            assert figures(own) == pytest.approx(figures(expected), rel=tolerance)
    if "16" in options:
        assert any(fused.weights != stock.weights for stock, fused, _ in results), "it ran"


def train_noting(rank: int, flags: str, schedules: Sequence[str | None]) -> tuple[list[Outcome], list[int]]:
    """The training, and how many weight gradients were still to be computed when each reduction began. The first rank
    has its last three W's at its end: only it reduces in several buckets.
    """
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as BucketGroup

    from megatron.zero_bubble.job import source
    from megatron.zero_bubble.wgrad.store import WgradStore

    stores: list[WgradStore] = []
    left: list[int] = []
    make, start = WgradStore.__init__, BucketGroup.start_grad_sync

    def noted_make(self: Any, *arguments: Any) -> None:
        stores.append(self)
        make(self, *arguments)

    def noted_start(self: Any, *arguments: Any, **named: Any) -> None:
        if stores:
            left.append(len(stores[-1]))
        start(self, *arguments, **named)

    def with_a_tail(name: str, **figures: Any) -> Schedule:
        schedule = build(name, **figures)
        row = schedule.order[0]
        tail = [p for p in row if p.kind is Kind.W][-3:]
        return replace(schedule, order=((*(p for p in row if p not in tail), *tail), *schedule.order[1:]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "build", with_a_tail)
        patch.setattr(WgradStore, "__init__", noted_make)
        patch.setattr(BucketGroup, "start_grad_sync", noted_start)
        return train(rank, flags, schedules), left


@pytest.mark.parametrize("options", ["", FUSED])
def test_the_tail_is_reduced_while_it_computes(ranks: RankPool, options: str) -> None:
    """With three W's left, the first reduction begins before the second of them."""
    flags = Layout(2, data=2, num_layers=4).flags(6, f"{OVERLAP} --untie-embeddings-and-output-weights {options}")
    schedules = [None, "zb-h2"]
    results = ranks.run(4, train_noting, flags, schedules, timeout=200)
    if not options:
        assert_same_bits([outcomes for outcomes, _ in results], schedules)
    linears = 2 * 4  # qkv, proj, fc1, fc2 of two layers
    left = results[0][1]
    # With all three left a bucket without a linear is reduced, in the last backward.
    assert any(2 * linears < n < 3 * linears for n in left), left


def train_half_split(
    rank: int, flags: str, run: Callable[..., list[Outcome]], schedules: Sequence[str | None]
) -> list[Outcome]:
    """Training whose own schedules have every second backward split, W right behind B."""
    from megatron.zero_bubble.job import source

    def half_split(name: str, **figures: Any) -> Schedule:
        schedule = build(name, **figures)
        rows = (tuple(q for p in row for q in halves(p)) for row in schedule.order)
        return replace(schedule, order=tuple(rows))

    def halves(p: Pass) -> tuple[Pass, ...]:
        is_split = p.kind is Kind.BW and p.microbatch % 2
        return (p._replace(kind=Kind.B), p._replace(kind=Kind.W)) if is_split else (p,)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "build", half_split)
        return run(rank, flags, schedules)


@pytest.mark.parametrize("options", ["", FUSED])
def test_split_and_unsplit_backwards_add_to_the_same_weights(ranks: RankPool, options: str) -> None:
    flags = Layout(2, data=2).flags(4, f"--overlap-grad-reduce --untie-embeddings-and-output-weights {options}")
    results = ranks.run(4, train_half_split, flags, train, [None, "1f1b"], timeout=200)
    if not options:
        assert_same_bits(results, [None, "1f1b"])
        return
    for stock, own in results:
        assert figures(own.losses) == pytest.approx(figures(stock.losses), rel=1e-5)
        assert figures(own.grad_norms) == pytest.approx(figures(stock.grad_norms), rel=1e-5)
    beside = ranks.run(4, train_half_split, flags, train_beside, ["1f1b"], timeout=200)
    assert beside == [[own] for _, own in results]


class UntilJoined:
    """A stream that is as slow as it may be: what runs beside the passes happens when it is waited for."""

    num_late = 0

    def __init__(self) -> None:
        self._queued: list[Callable[[], None]] = []

    def run(self, work: Callable[[], None], uses: Iterable[Any]) -> None:
        self._queued.append(work)

    def join(self) -> None:
        while self._queued:
            UntilJoined.num_late += 1
            self._queued.pop(0)()


def train_beside(rank: int, flags: str, schedules: Sequence[str | None]) -> list[Outcome]:
    """The training with weight gradients on such a stream."""
    from megatron.zero_bubble.platforms.cpu import CpuPlatform

    UntilJoined.num_late = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "side_stream", lambda self: UntilJoined())
        outcomes = train(rank, f"{flags} --zero-bubble-wgrad-stream", schedules)
    assert UntilJoined.num_late, "W's went there"
    return outcomes


@pytest.mark.parametrize("schedule", ["zb-h2", "zb-v"])
@pytest.mark.parametrize("options", ["--overlap-grad-reduce", f"--bf16 --use-distributed-optimizer {OVERLAP}"])
def test_what_needs_a_gradient_waits_for_it(ranks: RankPool, schedule: str, options: str) -> None:
    """Whenever the stream gets to them, the bits are the same."""
    flags = Layout(2, data=2, num_layers=4).flags(3, f"{options} {FUSED}")
    own, expected = (ranks.run(4, run, flags, [schedule], timeout=200) for run in (train_beside, train))
    assert own == expected


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("options, tolerance", [("", 1e-4), ("--bf16", 1e-2)])
def test_two_hundred_iterations(ranks: RankPool, options: str, tolerance: float) -> None:
    layout = Layout(2, num_layers=4)
    shared = f"{options} --hidden-size 64 --seq-length 256 --max-position-embeddings 256 --lr 1e-3 --train-iters 200"
    outcomes = []
    for fuse in ("", FUSED):
        flags = layout.flags(4, f"{shared} --eval-interval 200 {fuse}")
        outcomes.append(ranks.run(2, train, flags, ["zb-h1"], timeout=1000)[-1][0])
    exact, fused = (figures(outcome.losses) for outcome in outcomes)
    worst = max(abs(a - b) / b for a, b in zip(fused, exact, strict=True))
    print(f"{options or 'fp32'}: the loss of 200 iterations differs by {worst:.2e} at the most")
    assert 0 < worst < tolerance
