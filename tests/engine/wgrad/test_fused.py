"""Tests of fused weight gradients: near stock, equal across schedules, and reduced while the last W passes run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from megatron.zero_bubble import Kind, Pass, Schedule, build
from tests.helpers.parity import Layout, Outcome, assert_same_bits, train
from tests.helpers.ranks import RankPool
from tests.helpers.rows import some

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
"""Layout, microbatches, flags, and relative tolerance of losses and norms against stock after five steps."""


def figures(noted: Sequence[str]) -> list[float]:
    """Parse losses or norms; the loss of an evaluation follows the name of its split."""
    return [float.fromhex(text) for text in (words.split()[-1] for words in noted) if text != "None"]


@pytest.mark.parametrize(
    "layout, num_microbatches, options, tolerance", some(ROWS.values(), *list(ROWS.values())[:3]), ids=ROWS
)
def test_fused_gradients_are_near_stock_and_equal_across_schedules(
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
        assert any(fused.weights != stock.weights for stock, fused, _ in results), "fused accumulation must have run"


def train_noting(rank: int, flags: str, schedules: Sequence[str | None]) -> tuple[list[Outcome], list[int]]:
    """Train; return the outcomes, and the number of pending weight gradients at the start of each reduction.

    The first rank, the only one that reduces several buckets, runs its last three W passes at the end.
    """
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as BucketGroup

    from megatron.zero_bubble.engine.wgrad.store import WgradStore
    from megatron.zero_bubble.planning import source

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
def test_reduction_starts_before_the_last_w(ranks: RankPool, options: str) -> None:
    """With three W passes left, the first reduction starts before the second of them."""
    flags = Layout(2, data=2, num_layers=4).flags(6, f"{OVERLAP} --untie-embeddings-and-output-weights {options}")
    flags += " --train-iters 2"
    schedules = [None, "zb-h2"]
    results = ranks.run(4, train_noting, flags, schedules, timeout=200)
    if not options:
        assert_same_bits([outcomes for outcomes, _ in results], schedules, 2)
    linears = 2 * 4  # qkv, proj, fc1, fc2 of two layers
    left = results[0][1]
    # A bucket without linears is reduced in the last backward, with all three W passes left.
    assert any(2 * linears < n < 3 * linears for n in left), left


def train_half_split(
    rank: int, flags: str, run: Callable[..., list[Outcome]], schedules: Sequence[str | None]
) -> list[Outcome]:
    """Train with every second backward split, and each W directly after its B."""
    from megatron.zero_bubble.planning import source

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
def test_split_and_fused_backwards_accumulate_into_the_same_weights(ranks: RankPool, options: str) -> None:
    flags = Layout(2, data=2).flags(4, f"--overlap-grad-reduce --untie-embeddings-and-output-weights {options}")
    results = ranks.run(4, train_half_split, flags, train, [None, "1f1b"], timeout=200)
    if not options:
        assert_same_bits(results, [None, "1f1b"])
        return
    for stock, own in results:
        assert figures(own.losses) == pytest.approx(figures(stock.losses), rel=1e-5)
        assert figures(own.grad_norms) == pytest.approx(figures(stock.grad_norms), rel=1e-5)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("options, tolerance", [("", 1e-4), ("--bf16", 1e-2)])
def test_loss_stays_near_the_exact_run_for_200_iterations(ranks: RankPool, options: str, tolerance: float) -> None:
    layout = Layout(2, num_layers=4)
    shared = f"{options} --hidden-size 64 --seq-length 256 --max-position-embeddings 256 --lr 1e-3 --train-iters 200"
    outcomes = []
    for fuse in ("", FUSED):
        flags = layout.flags(4, f"{shared} --eval-interval 200 {fuse}")
        outcomes.append(ranks.run(2, train, flags, ["zb-h1"], timeout=1000)[-1][0])
    exact, fused = (figures(outcome.losses) for outcome in outcomes)
    worst = max(abs(a - b) / b for a, b in zip(fused, exact, strict=True))
    print(f"{options or 'fp32'}: the loss of 200 iterations differs by at most {worst:.2e}")
    assert 0 < worst < tolerance
