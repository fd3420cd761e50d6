"""The full matrix of sequence slices: cross products of the options of ``test_slices.py``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import pytest

from tests.helpers.parity import Layout
from tests.helpers.ranks import RankPool
from tests.helpers.slices import differences
from tests.integration.adapter.test_parity import BUCKETS, EXPERTS, LLAMA, ROPE, UNTIED
from tests.integration.adapter.test_parity_full import RECOMPUTE
from tests.integration.adapter.test_slices import EVEN, ODD, UNEVEN, check

EVERY = (*(EVEN.format(n) for n in (2, 4, 8)), UNEVEN)
LINEAR = [f"{name} {cuts}" for name in ("seq-1f1b", "seq-zb-h1") for cuts in (*EVERY, ODD)]
DIVISIBLE = [f"{name} {cuts}" for name in ("seq-1f1b", "seq-zb-h1") for cuts in EVERY]
INTERLEAVED = [f"seq-interleaved-1f1b {cuts}" for cuts in (*EVERY, ODD)]


def rows() -> Iterator[tuple[Layout, int, str, list[str]]]:
    """Yield layout, number of microbatches, options and schedules of every row."""
    positions = ("", ROPE, "--position-embedding-type none")
    for position, model, recompute in product(positions, ("", f"{LLAMA} {UNTIED}"), RECOMPUTE):
        if "--disable-bias-linear" not in model or "--disable-bias-linear" not in recompute:
            yield Layout(2, num_layers=4), 3, f"{position} {model} {recompute}", [*LINEAR, *INTERLEAVED]
    for count, loss in product((1, 2, 5), ("", "--calculate-per-token-loss")):
        yield Layout(2), count, f"{EXPERTS} {loss}", LINEAR
        yield Layout(4), count, f"{ROPE} {loss}", LINEAR
        yield Layout(2, num_layers=4), count, f"--reset-attention-mask {loss}", [*LINEAR, *INTERLEAVED]
        yield Layout(2, tensor=2), count, f"--sequence-parallel {ROPE} {UNTIED} {loss}", DIVISIBLE
        yield Layout(2, tensor=2), count, f"{UNTIED} {loss}", LINEAR
        yield Layout(2, data=2), count, f"--overlap-grad-reduce {BUCKETS} {loss}", LINEAR
    for option in ("--zero-bubble-fuse-wgrad", "--cross-entropy-loss-fusion", "--squared-relu"):
        yield Layout(2), 3, option, LINEAR
    experts = f"{EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
    yield Layout(2, data=2), 2, experts, LINEAR


def named() -> Iterator[object]:
    for layout, count, options, schedules in rows():
        text = " ".join(options.split())
        yield pytest.param(layout, count, text, schedules, id=f"{layout.words} m={count} {text}")


@pytest.mark.full
@pytest.mark.parametrize(("layout", "num_microbatches", "options", "schedules"), list(named()))
def test_gradients_equal_those_of_whole_sequences(
    ranks: RankPool, layout: Layout, num_microbatches: int, options: str, schedules: list[str]
) -> None:
    flags = layout.flags(num_microbatches, options)
    check(ranks.run(layout.num_ranks, differences, flags, schedules, timeout=240))


@pytest.mark.full
def test_normalized_keys(ranks: RankPool) -> None:
    """Only the whole gradient is compared: that of the bias of normalized keys is nothing but rounding."""
    check(ranks.run(2, differences, Layout(2).flags(3, "--qk-layernorm"), LINEAR, timeout=240), worst=math.inf)
