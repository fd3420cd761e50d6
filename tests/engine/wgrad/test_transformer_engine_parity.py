"""Train a GPT with linears of a fake TransformerEngine: equal bit for bit to stock 1F1B, which delays no gradient.

The layers take the options of megatron-core's TransformerEngine wrappers. ``tests/gpu/test_transformer_engine.py``
tests the real library.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from tests.engine.wgrad.test_fused import train_half_split
from tests.helpers import engine
from tests.helpers.engine_layers import Wrapper, with_engine
from tests.helpers.faults import Fault, train_with_faults
from tests.helpers.parity import Layout, Outcome, assert_same_bits, assert_same_model, train
from tests.helpers.ranks import RankPool

OVERLAP = "--overlap-grad-reduce --no-align-grad-reduce --ddp-bucket-size 1000"
# Layout, microbatches, fused accumulation, fp8, flags.
ROWS = {
    "tied": (Layout(2), 3, False, False, ""),
    "fused accumulation, fp8": (Layout(2), 3, True, True, ""),
    "bf16, overlap, fp8": (Layout(2, data=2), 4, False, True, f"--bf16 {OVERLAP}"),
    "bf16, distributed optimizer, aligned, fused accumulation": (
        Layout(2, data=2),
        3,
        True,
        False,
        "--bf16 --use-distributed-optimizer --overlap-grad-reduce",
    ),
    "recompute, no bias": (
        Layout(2),
        3,
        True,
        False,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --disable-bias-linear",
    ),
    "experts one by one": (
        Layout(2, data=2),
        3,
        False,
        False,
        f"--num-experts 4 --moe-aux-loss-coeff 0.01 --disable-bias-linear {OVERLAP}",
    ),
}


@contextmanager
def engine_layers(fused: bool, fp8: bool) -> Iterator[None]:
    """Build models with the fake engine's linears within this context."""
    from pretrain import model

    make = model._layer_spec
    with engine.installed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Wrapper, "fused", fused)
        patch.setattr(Wrapper, "fp8_layers", fp8)
        patch.setattr(model, "_layer_spec", lambda *args: with_engine(make(*args)))
        yield


def train_with_engine(
    rank: int, flags: str, schedules: Sequence[str | None], fused: bool, fp8: bool
) -> tuple[list[Outcome], list[str], int]:
    """Train; return the outcomes, the reported patches and the number of weight gradients that the store ran."""
    from megatron.zero_bubble.engine.wgrad.delayed import DelayedGradient
    from megatron.zero_bubble.integration import patching

    run, reported, ran = DelayedGradient.run, [], []

    def counted(self: DelayedGradient) -> Iterable[Any]:
        reported[:] = patching.report()
        ran.append(self)
        return run(self)

    with engine_layers(fused, fp8), pytest.MonkeyPatch.context() as patch:
        patch.setattr(DelayedGradient, "run", counted)
        outcomes = train(rank, flags, schedules)
    return outcomes, reported, len(ran)


BY_DEFAULT = {"fused accumulation, fp8", "bf16, overlap, fp8"}
PARAMETERS = [
    pytest.param(*row, id=name, marks=[] if name in BY_DEFAULT else [pytest.mark.full]) for name, row in ROWS.items()
]


@pytest.mark.parametrize("layout, num_microbatches, fused, fp8, options", PARAMETERS)
def test_same_bits_as_stock(
    ranks: RankPool, layout: Layout, num_microbatches: int, fused: bool, fp8: bool, options: str
) -> None:
    flags = layout.flags(num_microbatches, options)
    schedules = [None, "1f1b", "zb-h1", "zb-h2"]
    results = ranks.run(layout.num_ranks, train_with_engine, flags, schedules, fused, fp8, timeout=200)
    assert_same_bits([outcomes for outcomes, _, _ in results], schedules)
    for _, reported, num_ran in results:
        assert any("WeightGradStore.put" in line for line in reported)
        assert "num-experts" in options or num_ran == 5 * 2 * 4 * num_microbatches, (
            "5 steps, 2 schedules with W, 4 linears"
        )


def train_mixed(rank: int, flags: str, schedules: Sequence[str | None]) -> list[Outcome]:
    with engine_layers(fused=True, fp8=True):
        return train_half_split(rank, flags, train, schedules)


def test_split_and_fused_backwards_of_one_weight(ranks: RankPool) -> None:
    layout = Layout(2, data=2)
    flags, schedules = layout.flags(4, f"--untie-embeddings-and-output-weights {OVERLAP}"), [None, "1f1b"]
    assert_same_bits(ranks.run(layout.num_ranks, train_mixed, flags, schedules, timeout=200), schedules)


def test_same_bits_as_stock_on_a_v(ranks: RankPool) -> None:
    layout = Layout(2, data=2, num_layers=4)
    flags, schedules = layout.flags(3, f"--untie-embeddings-and-output-weights {OVERLAP}"), [None, "zb-v"]
    results = ranks.run(layout.num_ranks, train_with_engine, flags, schedules, True, True, timeout=200)
    assert_same_model([outcomes for outcomes, _, _ in results], schedules, layout)


def train_again(rank: int, flags: str, modes: Sequence[str], faults: Sequence[Fault], fused: bool) -> list[Outcome]:
    with engine_layers(fused, fp8=True):
        return train_with_faults(rank, flags, modes, faults, math.inf)


@pytest.mark.parametrize("options, fused", [pytest.param("", False, marks=pytest.mark.full), ("--bf16", True)])
def test_restarted_iterations_have_the_same_bits(ranks: RankPool, options: str, fused: bool) -> None:
    """Steps are validated during the next iteration's passes, which are repeated after a rejected step."""
    flags = Layout(2).flags(3, f"--clip-grad 100 --zero-bubble-schedule zb-h2 --train-iters 10 {options}")
    faults, modes = [Fault(5, 1, 0, 1e6), Fault(8, 0, 1, 1e6)], ["", "--zero-bubble-post-validation"]
    results = ranks.run(2, train_again, flags, modes, faults, fused, timeout=200)
    assert_same_bits(results, modes, 10)
    counts = sum((ahead.counts for _, ahead in results), Counter())
    assert {"ahead", "repeated"} <= counts.keys(), counts
