"""Under every schedule, ``pretrain_gpt.py`` prints the losses and gradient norms of its stock run."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers.megatron_lm import VARIABLE, Checkout, Log, checkouts, pretrain_gpt, stock

CHECKOUTS = checkouts()
pytestmark = [
    pytest.mark.skipif(not CHECKOUTS, reason=f"{VARIABLE} names no checkout of Megatron-LM"),
    pytest.mark.timeout(1200),
]


class Row(NamedTuple):
    """One combination of features: the ranks that it takes, and its flags.

    Attributes:
        since: the first minor of megatron-core that has them.
        moves: whether the stages may lie elsewhere than where Megatron has them.
    """

    ranks: int
    flags: str
    since: int = 13
    moves: bool = True


_PP2 = "--pipeline-model-parallel-size 2"
_UNTIED = f"{_PP2} --untie-embeddings-and-output-weights"
_MOE = f"{_UNTIED} --num-experts 4 --swiglu --disable-bias-linear"
PLAIN = {
    "pp2": Row(2, _UNTIED),
    "pp4": Row(4, "--pipeline-model-parallel-size 4 --untie-embeddings-and-output-weights --num-layers 8"),
}
# Every row of the table of variants that Megatron-LM itself can train on CPU ranks.
FEATURES = {
    "tied": Row(2, _PP2),
    "distopt": Row(2, f"{_UNTIED} --use-distributed-optimizer"),
    "bf16": Row(2, f"{_UNTIED} --bf16"),
    "bf16-distopt": Row(2, f"{_UNTIED} --bf16 --use-distributed-optimizer"),
    "fp16": Row(2, f"{_UNTIED} --fp16 --initial-loss-scale 256"),
    "tp2-sp-pp2": Row(4, f"{_UNTIED} --tensor-model-parallel-size 2 --sequence-parallel"),
    "tp2-pp2": Row(4, f"{_UNTIED} --tensor-model-parallel-size 2"),
    "dp2": Row(4, _UNTIED),
    "dp2-overlap": Row(4, f"{_UNTIED} --overlap-grad-reduce"),
    "dp2-all-overlaps": Row(4, f"{_UNTIED} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "dp2-unaligned": Row(4, f"{_UNTIED} --use-distributed-optimizer --overlap-grad-reduce --no-align-grad-reduce"),
    "moe-allgather": Row(2, _MOE),
    "moe-alltoall": Row(
        2,
        f"{_MOE} --moe-token-dispatcher-type alltoall --moe-router-topk 2 --moe-router-load-balancing-type aux_loss "
        "--moe-aux-loss-coeff 1e-2",
    ),
    "moe-shared": Row(2, f"{_MOE} --moe-token-dispatcher-type alltoall --moe-shared-expert-intermediate-size 64"),
    "moe-ep2": Row(4, f"{_MOE} --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2"),
    "mtp": Row(2, f"{_UNTIED} --mtp-num-layers 1", moves=False),
    "per-token": Row(2, f"{_UNTIED} --calculate-per-token-loss"),
    "recompute-full": Row(
        2, f"{_UNTIED} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ),
    "recompute-selective": Row(2, f"{_UNTIED} --recompute-activations"),
    "llama": Row(
        2,
        f"{_UNTIED} --swiglu --normalization RMSNorm --disable-bias-linear --group-query-attention "
        "--num-query-groups 2",
    ),
    "ce-fusion": Row(2, f"{_UNTIED} --cross-entropy-loss-fusion"),
    "logging": Row(
        2,
        f"{_UNTIED} --log-num-zeros-in-grad --log-params-norm --timing-log-level 2 --log-throughput",
    ),
    "rampup": Row(2, f"{_UNTIED} --rampup-batch-size 8 4 40 --train-samples 120 --lr-decay-samples 100"),
    "evaluation": Row(2, f"{_UNTIED} --eval-interval 4 --eval-iters 2"),
    "signal-handler": Row(2, f"{_UNTIED} --exit-signal-handler --manual-gc --manual-gc-interval 3"),
    "rerun": Row(2, f"{_UNTIED} --rerun-mode validate_results"),
}
IN_PLACE = ("zb-h1", "zb-h2")


def _usable(checkout: Checkout, row: Row) -> None:
    if int(checkout.minor.partition(".")[2]) < row.since:
        pytest.skip(f"Megatron-LM {checkout} does not have these flags")


def _same(own: Log, expected: Log) -> None:
    assert own.exit_codes == expected.exit_codes, own.text[-4000:]
    assert own.figures == expected.figures
    assert len(own.figures) >= 8
    assert len(own.of("zero-bubble: schedule ")) == 1


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
@pytest.mark.parametrize("schedule", IN_PLACE)
@pytest.mark.parametrize("name", PLAIN)
def test_the_same_lines(checkout: Checkout, name: str, schedule: str) -> None:
    row = PLAIN[name]
    _usable(checkout, row)
    _same(pretrain_gpt(checkout, row.ranks, row.flags, schedule), stock(checkout, row.ranks, row.flags))


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
@pytest.mark.parametrize("name", PLAIN)
def test_the_same_lines_while_it_plans_and_switches(checkout: Checkout, name: str) -> None:
    row = PLAIN[name]
    _usable(checkout, row)
    flags = f"{row.flags} --train-iters 60"
    own = pretrain_gpt(checkout, row.ranks, flags, "zb-auto")
    _same(own, stock(checkout, row.ranks, flags))
    assert any("switched to the planned schedule" in line for line in own.of("zero-bubble: zb-auto: ")), own.text[
        -4000:
    ]


@pytest.mark.full
@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2"])
@pytest.mark.parametrize("name", FEATURES)
def test_the_same_lines_with_features(checkout: Checkout, name: str, schedule: str) -> None:
    row = FEATURES[name]
    _usable(checkout, row)
    _same(pretrain_gpt(checkout, row.ranks, row.flags, schedule), stock(checkout, row.ranks, row.flags))


# Stages that lie elsewhere draw other initial weights from a seed, so these go on from a stock checkpoint. Their
# gradient norm adds the ranks' parts in another order, and a step clipped by it differs by a rounding: none is.
_MOVING = "--clip-grad 1000 --ckpt-format torch_dist"


def _moved(checkout: Checkout, row: Row, schedule: str, folder: Path) -> None:
    _usable(checkout, row)
    flags = f"{row.flags} {_MOVING}"
    saved = stock(checkout, row.ranks, flags, ("--save", str(folder), "--save-interval", "2", "--exit-interval", "2"))
    assert "exiting program at iteration 2" in saved.text, saved.text[-2000:]
    load = ["--load", str(folder)]
    if "--use-distributed-optimizer" in flags:
        load.append("--no-load-optim")  # Megatron-LM cannot load that of torch's Adam, which is all there is on a CPU
    _same(pretrain_gpt(checkout, row.ranks, flags, schedule, load), stock(checkout, row.ranks, flags, tuple(load)))


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
@pytest.mark.parametrize("name", PLAIN)
def test_the_same_lines_on_a_v(checkout: Checkout, name: str, tmp_path: Path) -> None:
    _moved(checkout, PLAIN[name], "zb-v", tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
@pytest.mark.parametrize("name", [name for name, row in FEATURES.items() if row.moves])
def test_the_same_lines_on_a_v_with_features(checkout: Checkout, name: str, tmp_path: Path) -> None:
    _moved(checkout, FEATURES[name], "zb-v", tmp_path)
