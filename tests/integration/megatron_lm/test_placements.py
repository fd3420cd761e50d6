"""Jobs of Megatron-LM on a V, on a loop and in a wave have the logs of stock from the same checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.megatron_lm import VARIABLE, Checkout, Log, pretrain_gpt, stock
from tests.integration.megatron_lm.test_parity import (
    CASES,
    CHECKOUTS,
    COMBINED,
    FEATURES,
    PLAIN,
    UNTIED,
    Row,
    continued,
    job_of,
    same,
    switched,
    until,
)

pytestmark = [
    pytest.mark.skipif(not CHECKOUTS, reason=f"{VARIABLE} names no checkout of Megatron-LM"),
    pytest.mark.timeout(1200),
]

# With another placement a seed yields other initial weights, so these jobs continue from a stock checkpoint. The order
# of the sum in the gradient norm differs as well, and clipped steps would differ by rounding, so no step is clipped.
_MOVING = "--clip-grad 1000 --ckpt-format torch_dist"


def _moved(checkout: Checkout, pipeline: int, row: Row, folder: Path) -> None:
    job = job_of(checkout, pipeline, row, _MOVING)
    save, load = [*until(2, folder)], ["--load", str(folder)]
    if "--use-distributed-optimizer" in row.flags:
        # Megatron-LM cannot load a distributed optimizer with torch's Adam, the only one on CPUs. Before core_r0.16 it
        # cannot save it either.
        save.append("--no-save-optim")
        load.append("--no-load-optim")
    saved = stock(*job, tuple(save))
    assert "exiting program at iteration 2" in saved.text, saved.text[-2000:]
    own = pretrain_gpt(*job, "zb-v", load)
    has_copies = "--untie-embeddings-and-output-weights" not in row.flags or "--mtp-num-layers" in row.flags
    if checkout.minor in ("0.13", "0.14") and has_copies:
        assert "cannot load a checkpoint if one rank holds" in own.text
        return
    same(own, stock(*job, tuple(load)))


@pytest.mark.parametrize(("checkout", "pipeline"), CASES)
def test_logs_equal_stock_on_a_v(checkout: Checkout, pipeline: int, tmp_path: Path) -> None:
    _moved(checkout, pipeline, PLAIN, tmp_path)


@pytest.mark.parametrize(("checkout", "pipeline"), CASES)
@pytest.mark.parametrize("name", [name for name, row in COMBINED.items() if row.moves])
def test_logs_equal_stock_on_a_v_with_combined_features(
    checkout: Checkout, pipeline: int, name: str, tmp_path: Path
) -> None:
    _moved(checkout, pipeline, COMBINED[name], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(("checkout", "pipeline"), CASES)
@pytest.mark.parametrize("name", [name for name, row in FEATURES.items() if row.moves])
def test_logs_equal_stock_on_a_v_with_each_feature(
    checkout: Checkout, pipeline: int, name: str, tmp_path: Path
) -> None:
    _moved(checkout, pipeline, FEATURES[name], tmp_path)


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
def test_logs_equal_stock_on_a_v_with_the_layout_of_deepseek(checkout: Checkout, tmp_path: Path) -> None:
    """Multi-token prediction and the loss are alone on the last two stages, on two ranks."""
    if int(checkout.minor.partition(".")[2]) < 16:
        pytest.skip("this version does not train multi-token prediction before the last stage")
    flags = f"--pipeline-model-parallel-size 4 --num-layers 8 --global-batch-size 8 {UNTIED} --mtp-num-layers 1"
    line, vee = ("--pipeline-model-parallel-layout " + text for text in ("Ett|tt|tt|ttmL", "Ett|t|t|t|t|tt|m|L"))
    own, expected = on_a_v_after(checkout, 4, flags, tmp_path, line, vee)
    same(own, expected)
    assert all("mtp_1 loss" in figures for figures in own.figures if figures.startswith("iteration"))


def on_a_v_after(
    checkout: Checkout,
    num_ranks: int,
    flags: str,
    folder: Path,
    line: str = "",
    vee: str = "",
    more: tuple[str, ...] = (),
) -> tuple[Log, Log]:
    """Continue a stock checkpoint under zb-v and in stock.

    Args:
        line, vee: more flags of the stock jobs, and of the job on a V; ``more`` are flags of this package.
    """
    stock(checkout, num_ranks, f"{flags} {line} {_MOVING}", tuple(until(2, folder)))
    load = ("--load", str(folder))
    own = pretrain_gpt(checkout, num_ranks, f"{flags} {vee} {_MOVING}", "zb-v", (*load, *more))
    return own, stock(checkout, num_ranks, f"{flags} {line} {_MOVING}", load)


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
def test_logs_equal_stock_interleaved_with_multi_token_prediction(checkout: Checkout) -> None:
    job = job_of(checkout, 2, FEATURES["mtp-tied"], "--num-virtual-stages-per-pipeline-rank 2")
    same(pretrain_gpt(*job, "interleaved-1f1b"), stock(*job))


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
def test_checkpoint_of_a_v_continues_in_stock(checkout: Checkout, tmp_path: Path) -> None:
    """The V continues from a stock checkpoint, and stock continues from the V's checkpoint as from its own."""
    job = job_of(checkout, 2, PLAIN, _MOVING)
    begun = tmp_path / "begun"
    stock(*job, until(2, begun))
    load = ("--load", str(begun))
    assert continued(job, "zb-v", 6, tmp_path, load) == continued(job, None, 6, tmp_path, load)


_ON_A_LOOP = {"zb-interleaved": (), "zb-auto": ("--zero-bubble-placement", "loop")}
_VIRTUAL = {
    2: "--num-layers 4 --num-virtual-stages-per-pipeline-rank 2",
    4: "--num-layers 8 --num-layers-per-virtual-pipeline-stage 1",
}


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
@pytest.mark.parametrize("num_chunks", [2, 4])
@pytest.mark.parametrize("schedule", _ON_A_LOOP)
def test_jobs_that_interleave_change_nothing_else(checkout: Checkout, num_chunks: int, schedule: str) -> None:
    """Stages, initial weights and the order of gradients are those of Megatron's virtual pipeline."""
    flags = f"--pipeline-model-parallel-size 2 --global-batch-size 6 {UNTIED} {_VIRTUAL[num_chunks]}"
    job = checkout, 2, f"{flags} --train-iters 60" if schedule == "zb-auto" else flags
    own = pretrain_gpt(*job, schedule, _ON_A_LOOP[schedule])
    same(own, stock(*job))
    if schedule == "zb-auto":
        switched(own)


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
def test_logs_equal_stock_in_a_wave(checkout: Checkout, tmp_path: Path) -> None:
    """Four stages per rank, after a checkpoint of stock, which has one."""
    flags = f"--pipeline-model-parallel-size 2 --num-layers 8 --global-batch-size 6 {UNTIED} {_MOVING}"
    stock(checkout, 2, flags, tuple(until(2, tmp_path)))
    load = ("--load", str(tmp_path))
    own = pretrain_gpt(checkout, 2, flags, "zb-auto", (*load, "--zero-bubble-placement", "wave"))
    same(own, stock(checkout, 2, flags, load))


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
def test_checkpoint_of_a_wave_continues_in_stock(checkout: Checkout, tmp_path: Path) -> None:
    job = checkout, 2, f"--pipeline-model-parallel-size 2 --num-layers 8 --global-batch-size 6 {UNTIED} {_MOVING}"
    begun = tmp_path / "begun"
    stock(*job, until(2, begun))
    load = ("--load", str(begun))
    wave = (*load, "--zero-bubble-placement", "wave")
    assert continued(job, "zb-auto", 6, tmp_path, wave) == continued(job, None, 6, tmp_path, load)
