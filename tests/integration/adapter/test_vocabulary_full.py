"""The full matrix of vocabulary parallelism: cross products of the options of ``test_vocabulary.py``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from statistics import mean

import pytest

from tests.helpers.parity import Layout, train
from tests.helpers.ranks import RankPool
from tests.helpers.vocabulary import differences, distances_in_bf16, largest_differences, train_with_rounded_weights
from tests.integration.adapter.test_parity import DROPOUT, EXPERTS, FP16, LLAMA, ROPE, UNTIED
from tests.integration.adapter.test_parity_full import ALL_TO_ALL, EXPERT_PARALLEL, RECOMPUTE, REDUCTIONS, WHOLE_EXPERTS
from tests.integration.adapter.test_vocabulary import AGAIN, PADDING, check, divided

Row = tuple[Layout, int, str, list[str]]

LINEAR = divided("1f1b", "zb-h1", "zb-h2")
TWO_STAGES = divided("zb-v", "v-half", "interleaved-1f1b")
NUM_DRAWS = 6
SEQUENCE_PARALLEL = "--sequence-parallel"
CLIPPED = "--clip-grad 0.5 --weight-decay 0.1"


def on_each(pipeline: int, count: int, options: str, tensor: int = 1, data: int = 1) -> Iterator[Row]:
    """Yield a row with one stage per rank, and one with two."""
    yield Layout(pipeline, tensor, data), count, options, LINEAR
    yield Layout(pipeline, tensor, data, num_layers=2 * pipeline), count, options, TWO_STAGES


def gradient_rows() -> Iterator[Row]:
    """Yield layout, number of microbatches, options and schedules of every row that compares gradients."""
    for pipeline, tied, vocabulary in product((2, 3, 4), ("", UNTIED), ("", PADDING)):
        for count in sorted({1, pipeline - 1, 3 * pipeline}):
            yield from on_each(pipeline, count, f"{tied} {vocabulary}")
    for model, recompute in product(("", f"{UNTIED} {ROPE}", f"{UNTIED} {LLAMA} {ROPE}"), RECOMPUTE):
        if "--disable-bias-linear" not in model or "--disable-bias-linear" not in recompute:
            yield from on_each(2, 3, f"{model} {recompute}")
    for sequence, tied, vocabulary in product(("", SEQUENCE_PARALLEL), ("", UNTIED), ("", PADDING)):
        yield from on_each(2, 3, f"{sequence} {tied} {vocabulary}", tensor=2)
    yield from on_each(3, 4, f"{SEQUENCE_PARALLEL} {PADDING} --calculate-per-token-loss", tensor=2)
    for experts, recompute in product((EXPERTS, ALL_TO_ALL), ("", RECOMPUTE[3])):
        yield from on_each(2, 3, f"{experts} {recompute} --calculate-per-token-loss")
    yield from on_each(2, 3, f"{ALL_TO_ALL} {SEQUENCE_PARALLEL} {WHOLE_EXPERTS}", tensor=2)
    yield from on_each(2, 3, EXPERT_PARALLEL, data=2)
    for layout, count, options, schedules in (
        *on_each(2, 3, f"{UNTIED} {PADDING}"),
        *on_each(3, 1, "--calculate-per-token-loss"),
        *on_each(2, 3, f"{SEQUENCE_PARALLEL} {PADDING}", tensor=2),
    ):
        yield layout, count, options, [f"{name} {AGAIN}" for name in schedules]
    for stages, layers, schedules in (
        ("Ett|t|t|ttL", 6, LINEAR),
        ("Ett|t|t|tt|tt|t|tt|tL --num-virtual-stages-per-pipeline-rank 2", 12, TWO_STAGES),
    ):
        yield Layout(4, num_layers=layers), 4, f"{UNTIED} --pipeline-model-parallel-layout {stages}", schedules
    for option in (
        "--calculate-per-token-loss",
        "--zero-bubble-fuse-wgrad",
        f"{UNTIED} --zero-bubble-fuse-wgrad",
        "--squared-relu",
        "--disable-bias-linear --add-qkv-bias",
        "--position-embedding-type none",
        "--zero-bubble-post-receives late",
        "--micro-batch-size 1",
    ):
        yield from on_each(2, 3, option)


def step_rows() -> Iterator[Row]:
    """As ``gradient_rows``, for rows that compare five steps."""
    for reduction, tied in product(REDUCTIONS, ("", UNTIED)):
        yield from on_each(2, 3, f"{reduction} {tied}", data=2)
    for reduction in (REDUCTIONS[3], REDUCTIONS[5]):
        yield from on_each(2, 3, f"{reduction} --calculate-per-token-loss --zero-bubble-fuse-wgrad", data=2)
        yield from on_each(2, 5, f"{reduction} --rampup-batch-size 4 4 16", data=2)
        yield from on_each(3, 2, reduction, data=2)
        yield from on_each(2, 3, f"{reduction} {SEQUENCE_PARALLEL} {PADDING}", tensor=2, data=2)
    for pipeline, count, tied, optimizer in product((2, 3), (1, 5), ("", UNTIED), ("", "--optimizer sgd")):
        yield from on_each(pipeline, count, f"{tied} {CLIPPED} {optimizer}")
    yield Layout(2), 3, f"{DROPOUT} {UNTIED}", LINEAR
    yield Layout(2, tensor=2), 3, f"{DROPOUT} {SEQUENCE_PARALLEL}", LINEAR
    yield from on_each(2, 3, "--optimizer sgd")


def post_validated_rows() -> Iterator[Row]:
    """As ``step_rows``, with post-validation, whose optimizer steps are ahead of the norm."""
    for pipeline, count, options in product((2, 3), (1, 5), ("", UNTIED, f"{PADDING} --calculate-per-token-loss")):
        for layout, m, flags, schedules in on_each(pipeline, count, f"{options} --clip-grad 0.5"):
            yield layout, m, flags, [f"{name} --zero-bubble-post-validation" for name in schedules]


def half_rows() -> Iterator[Row]:
    """Rows in 16 bits."""
    models = ("", UNTIED, f"{LLAMA} {ROPE} {UNTIED}", f"{UNTIED} {PADDING}", RECOMPUTE[3])
    for model in models:
        yield from on_each(2, 3, model)
    yield from on_each(2, 3, f"{UNTIED} --zero-bubble-fuse-wgrad")
    yield from on_each(3, 4, UNTIED)
    yield from on_each(2, 3, f"{SEQUENCE_PARALLEL} {UNTIED}", tensor=2)


def named(rows: Iterator[Row]) -> Iterator[object]:
    for layout, count, options, schedules in rows:
        text, stages = " ".join(options.split()), 2 if schedules[0].startswith("zb-v") else 1
        again = " recomputed logits" if AGAIN in schedules[0] else ""
        yield pytest.param(layout, count, text, schedules, id=f"{layout.words} v={stages} m={count} {text}{again}")


COLUMNS = ("layout", "num_microbatches", "options", "schedules")


@pytest.mark.full
@pytest.mark.parametrize(COLUMNS, list(named(gradient_rows())))
def test_gradients_equal_those_of_whole_layers(
    ranks: RankPool, layout: Layout, num_microbatches: int, options: str, schedules: list[str]
) -> None:
    flags = layout.flags(num_microbatches, options)
    check(ranks.run(layout.num_ranks, differences, flags, schedules, timeout=240))


@pytest.mark.full
@pytest.mark.parametrize(COLUMNS, [*named(step_rows()), *named(post_validated_rows())])
def test_five_steps_equal_those_of_whole_layers(
    ranks: RankPool, layout: Layout, num_microbatches: int, options: str, schedules: list[str]
) -> None:
    """Adam divides each gradient by its own size, which enlarges rounding from step to step, in stock too.

    Where a norm differs by more than 1e-6, those of stock differ by more than half as much if its initial weights are
    changed by one unit in the last place.
    """
    flags = layout.flags(num_microbatches, options)
    found = ranks.run(layout.num_ranks, train, flags, [None, *schedules], timeout=240)
    pairs = [largest_differences(outcome, stock) for stock, *others in found for outcome in others]
    losses, norms = map(max, zip(*pairs, strict=True))
    assert losses <= 5e-7
    if norms > 1e-6:
        first, *others = ranks.run(layout.num_ranks, train_with_rounded_weights, flags, NUM_DRAWS, timeout=240)[0]
        assert norms <= 2 * max(largest_differences(outcome, first)[1] for outcome in others)


@pytest.mark.full
@pytest.mark.parametrize(COLUMNS, list(named(half_rows())))
def test_bf16_is_no_farther_from_float32_than_stock(
    ranks: RankPool, layout: Layout, num_microbatches: int, options: str, schedules: list[str]
) -> None:
    """On average over initial weights: with algorithm 2, sums are rounded at other places, which helps or harms."""
    draws: list[list[float]] = []
    for seed in range(NUM_DRAWS):
        flags = layout.flags(num_microbatches, f"{options} --seed {seed}")
        rows = ranks.run(layout.num_ranks, distances_in_bf16, flags, schedules, timeout=240)
        draws.append([difference.whole for difference in rows[0]])
    stock, *others = map(mean, zip(*draws, strict=True))
    assert max(others) <= 1.1 * stock, (stock, others)


@pytest.mark.full
@pytest.mark.parametrize(COLUMNS, list(named(half_rows())))
def test_overflowing_steps_are_skipped_as_in_stock(
    ranks: RankPool, layout: Layout, num_microbatches: int, options: str, schedules: list[str]
) -> None:
    # Models differ in the scale at which gradients overflow; it is halved after every step that is skipped.
    flags = layout.flags(num_microbatches, f"{FP16} --initial-loss-scale {2**24} --train-iters 9 {options}")
    for stock, *others in ranks.run(layout.num_ranks, train, flags, [None, *schedules], timeout=240):
        wanted = [norm == "skipped" for norm in stock.grad_norms]
        assert any(wanted) and not all(wanted)
        for outcome in others:
            assert outcome.loss_scales == stock.loss_scales
            assert [norm == "skipped" for norm in outcome.grad_norms] == wanted
