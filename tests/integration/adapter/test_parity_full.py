"""The full parity matrix: cross products of the options of ``test_parity.py``, 20 minutes on two cores.

No row has a tolerance: split backwards keep the microbatch order in which Megatron accumulates.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from tests.helpers.parity import Layout, assert_same_bits, train
from tests.helpers.ranks import RankPool
from tests.integration.adapter.test_parity import BUCKETS, DROPOUT, EXPERTS, FP16, LLAMA, ROPE, SCHEDULES, UNTIED

Row = tuple[Layout, int, str]

DTYPES = ("", "--bf16", FP16)
OVERLAP = f"--overlap-grad-reduce {BUCKETS}"
DISTRIBUTED = "--use-distributed-optimizer"
GATHER = f"{DISTRIBUTED} {OVERLAP} --overlap-param-gather"
REDUCTIONS = (
    "",
    DISTRIBUTED,
    OVERLAP,
    f"{OVERLAP} --no-align-grad-reduce",
    f"{DISTRIBUTED} {OVERLAP}",
    GATHER,
    f"{GATHER} --no-align-grad-reduce",
)
RECOMPUTE = (
    "",
    "--recompute-granularity selective",
    "--recompute-granularity selective --recompute-modules mlp --disable-bias-linear",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
)
ALL_TO_ALL = f"{EXPERTS} --moe-token-dispatcher-type alltoall"
EXPERT_PARALLEL = f"{ALL_TO_ALL} --expert-model-parallel-size 2"
SEQUENCE_PARALLEL = "--sequence-parallel"
# gloo gathers only equal shapes: on the CPU, stock megatron-core cannot split an expert over tensor-parallel ranks.
WHOLE_EXPERTS = f"{SEQUENCE_PARALLEL} --expert-tensor-parallel-size 1"


def _microbatches(num_ranks: int) -> list[int]:
    return sorted({1, num_ranks - 1, num_ranks, num_ranks + 1, 3 * num_ranks + 1})


def _pipelines() -> Iterator[Row]:
    for num_ranks in (2, 4):
        options = product(DTYPES, ("", UNTIED), ("", "--disable-bias-linear"))
        for count, option in product(_microbatches(num_ranks), options):
            yield Layout(num_ranks), count, " ".join(option)


def _tensor_parallel() -> Iterator[Row]:
    options = product(("", SEQUENCE_PARALLEL), ("", "--bf16"), ("", UNTIED))
    for count, option in product((1, 2, 3, 7), options):
        yield Layout(2, tensor=2), count, " ".join(option)


def _data_parallel() -> Iterator[Row]:
    for count, *option in product((1, 3, 7), REDUCTIONS, ("", "--bf16"), ("", UNTIED)):
        yield Layout(2, data=2), count, " ".join(option)


def _layers() -> Iterator[Row]:
    models = (UNTIED, f"{LLAMA} {ROPE}")
    for option in product(models, RECOMPUTE, ("", DROPOUT), ("", "--bf16"), ("", "--calculate-per-token-loss")):
        yield Layout(2, num_layers=4), 3, " ".join(option)


def _experts() -> Iterator[Row]:
    layouts = (
        (Layout(2), EXPERTS),
        (Layout(2), ALL_TO_ALL),
        (Layout(2, tensor=2), f"{ALL_TO_ALL} {WHOLE_EXPERTS}"),
        (Layout(2, data=2), EXPERT_PARALLEL),
    )
    losses = ("", "--moe-router-load-balancing-type seq_aux_loss", "--moe-z-loss-coeff 0.01 --calculate-per-token-loss")
    for (layout, experts), loss, recompute in product(layouts, losses, ("", RECOMPUTE[3])):
        yield layout, 3, f"{experts} {loss} {recompute}"


def _others() -> Iterator[Row]:
    """Options that are independent of the others, and jobs that combine many options."""
    pair = Layout(2)
    for option in (
        "--squared-relu",
        "--qk-layernorm",
        "--cross-entropy-loss-fusion",
        "--disable-bias-linear --add-qkv-bias",
        "--position-embedding-type none",
        "--attention-softmax-in-fp32 --bf16",
        "--no-bias-gelu-fusion --no-bias-dropout-fusion",
        "--optimizer sgd",
        "--clip-grad 0.01 --weight-decay 0.1",
        "--fp16 --loss-scale 128",
        f"{EXPERTS} --moe-shared-expert-intermediate-size 32",
    ):
        yield pair, 3, option
    yield Layout(2, num_layers=4), 3, "--decoder-first-pipeline-num-layers 1"
    yield Layout(2, data=2), 3, "--bf16 --grad-reduce-in-bf16"
    for reduction in REDUCTIONS:
        yield Layout(2, data=2), 5, f"{reduction} --rampup-batch-size 4 4 16"
    everything = f"--bf16 {LLAMA} {ROPE} {UNTIED} {RECOMPUTE[1]} {GATHER} --clip-grad 1.0"
    yield Layout(2, tensor=2, data=2), 5, f"{everything} {SEQUENCE_PARALLEL}"
    yield Layout(4, data=2), 5, everything
    yield Layout(4, tensor=2), 5, f"{SEQUENCE_PARALLEL} {DROPOUT}"
    yield Layout(2, tensor=2, data=2), 3, f"--bf16 {EXPERT_PARALLEL} {WHOLE_EXPERTS} {GATHER}"


def matrix() -> Iterator[tuple[str, Layout, int, str]]:
    """Yield group, layout, number of microbatches and options of every row."""
    for rows in (_pipelines, _tensor_parallel, _data_parallel, _layers, _experts, _others):
        for layout, count, options in rows():
            yield rows.__name__[1:], layout, count, " ".join(options.split())


def _rows() -> Iterator[object]:
    for group, layout, count, options in matrix():
        yield pytest.param(layout, count, options, id=f"{group}: {layout.words} m={count} {options}")


@pytest.mark.full
@pytest.mark.parametrize(("layout", "num_microbatches", "options"), list(_rows()))
def test_same_bits_as_stock(ranks: RankPool, layout: Layout, num_microbatches: int, options: str) -> None:
    results = ranks.run(layout.num_ranks, train, layout.flags(num_microbatches, options), SCHEDULES, timeout=120)
    assert_same_bits(results, SCHEDULES)
