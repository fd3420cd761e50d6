"""Slices of sequences against stock megatron-core on whole sequences: equal up to rounding, in float32.

A row combines options that do not mask each other's errors. ``test_slices_full.py`` has the cross products.
"""

from __future__ import annotations

import pytest
import torch

from tests.helpers.parity import Layout
from tests.helpers.ranks import RankPool
from tests.helpers.rows import some
from tests.helpers.slices import HALF, Difference, differences, distances_in_half
from tests.integration.adapter.test_parity import BUCKETS, EXPERTS, LLAMA, ROPE, UNTIED

EVEN, UNEVEN, ODD = (
    "--zero-bubble-num-slices {}",
    "--zero-bubble-slice-ends 20,34,42,48",
    "--zero-bubble-slice-ends 1,24,29,48",
)
MANY = [f"seq-1f1b {EVEN.format(2)}", f"seq-zb-h1 {EVEN.format(4)}", f"seq-zb-h1 {UNEVEN}"]
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

ROWS = {
    "learned positions, tied, bias": (
        Layout(2),
        3,
        "",
        [*MANY, f"seq-1f1b {EVEN.format(8)}", f"seq-zb-h1 {EVEN.format(16)}", f"seq-zb-h1 {ODD}"],
    ),
    "m=1, rotary, llama, per-token loss, selective recompute": (
        Layout(2),
        1,
        f"{LLAMA} {ROPE} {UNTIED} --calculate-per-token-loss --recompute-granularity selective",
        [*MANY, f"seq-zb-h1 {ODD}"],
    ),
    "full recompute, rotary, two stages per rank": (
        Layout(2, num_layers=4),
        3,
        f"{ROPE} {FULL_RECOMPUTE}",
        [*MANY, f"seq-interleaved-1f1b {EVEN.format(2)}", f"seq-interleaved-1f1b {UNEVEN}"],
    ),
    "experts": (Layout(2), 2, f"{EXPERTS} {UNTIED} --init-method-std 0.1", MANY),
    "masks of documents": (Layout(2), 3, "--reset-attention-mask", MANY),
    "tp=2 and sequence parallel": (Layout(2, tensor=2), 3, f"--sequence-parallel {ROPE} {UNTIED}", MANY),
    "dp=2, overlap_grad_reduce": (Layout(2, data=2), 3, f"--overlap-grad-reduce {BUCKETS}", MANY),
    "p=4": (Layout(4), 2, ROPE, MANY[1:]),
}


def check(found: list[list[Difference]], losses: float = 1e-6, worst: float = 2e-6, whole: float = 1e-6) -> None:
    """Check the differences of all schedules on all ranks."""
    for of_rank in found:
        for difference in of_rank:
            assert difference.losses <= losses and difference.worst <= worst and difference.whole <= whole, found


@pytest.mark.parametrize("name", some(ROWS, *list(ROWS)[1:4], list(ROWS)[5]))
def test_gradients_equal_those_of_whole_sequences(ranks: RankPool, name: str) -> None:
    layout, num_microbatches, options, schedules = ROWS[name]
    check(ranks.run(layout.num_ranks, differences, layout.flags(num_microbatches, options), schedules, timeout=120))


def test_one_slice_is_stock_bit_for_bit(ranks: RankPool) -> None:
    flags = Layout(2).flags(3, f"{LLAMA} {ROPE} {UNTIED}")
    schedules = [f"{name} {EVEN.format(1)}" for name in ("seq-1f1b", "seq-zb-h1")]
    check(ranks.run(2, differences, flags, schedules, timeout=120), 0.0, 0.0, 0.0)


def test_auxiliary_losses_of_slices_that_are_routed_again_count_by_their_tokens(ranks: RankPool) -> None:
    """The loss of a slice is not that of the whole sequence, because it is not linear in the tokens."""
    flags = Layout(2).flags(3, f"{EXPERTS} {UNTIED} --init-method-std 0.1 {FULL_RECOMPUTE}")
    found = ranks.run(2, differences, flags, MANY, timeout=120)
    for of_rank in found:
        assert all(difference.losses <= 1e-6 and 1e-5 < difference.whole <= 5e-3 for difference in of_rank), found


@pytest.mark.parametrize("half", HALF, ids=str)
def test_half_precision_is_no_farther_from_float32_than_stock(ranks: RankPool, half: torch.dtype) -> None:
    flags = Layout(2).flags(3, f"{LLAMA} {ROPE} {UNTIED}")
    for stock, *sliced in ranks.run(2, distances_in_half, flags, MANY, half, timeout=120):
        assert all(difference.whole <= 1.1 * stock.whole for difference in sliced), (stock, sliced)
