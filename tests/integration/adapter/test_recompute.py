"""Recomputation as a pass of its own (R): the bits of stock, whose backwards compute activations again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.zero_bubble.core.formats.schedule import schedule_content
from megatron.zero_bubble.core.schedules import build
from megatron.zero_bubble.core.search.recompute import with_recomputation
from tests.helpers.parity import Layout, assert_same_bits, assert_same_model, train
from tests.helpers.ranks import RankPool
from tests.helpers.rows import some
from tests.integration.adapter.test_auto import STEPS as SWITCHED
from tests.integration.adapter.test_auto import train_and_wait_for_the_plan

UNIFORM = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
PAIRS_OF_LAYERS = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
DROPOUT = "--attention-dropout 0.2 --hidden-dropout 0.2"
EXPERTS = "--num-experts 4 --moe-aux-loss-coeff 0.01 --swiglu --disable-bias-linear"
EARLY = "--zero-bubble-recompute early"
LINE = ("1f1b", "zb-h1")

ROWS = {
    "dropout": (Layout(2, num_layers=4), 5, f"{UNIFORM} {DROPOUT}", LINE),
    "bf16, two layers per checkpoint": (Layout(2, num_layers=4), 3, f"{PAIRS_OF_LAYERS} {DROPOUT} --bf16", LINE),
    "some layers of a stage": (Layout(2, num_layers=6), 3, f"{BLOCK} {DROPOUT}", LINE),
    "experts": (Layout(2, num_layers=4), 3, f"{UNIFORM} {EXPERTS}", LINE),
    "tensor parallelism": (
        Layout(2, tensor=2, num_layers=4),
        3,
        f"{UNIFORM} {DROPOUT}",
        LINE,
    ),
    "4 ranks": (Layout(4, num_layers=8), 6, f"{UNIFORM} {DROPOUT}", LINE),
    "two stages per rank": (
        Layout(2, num_layers=4),
        4,
        f"{UNIFORM} {DROPOUT} --num-virtual-stages-per-pipeline-rank 2",
        ("interleaved-1f1b", "zb-interleaved"),
    ),
    "post-validation": (
        Layout(2, num_layers=4),
        3,
        f"{UNIFORM} {DROPOUT} --clip-grad 0.1 --zero-bubble-post-validation",
        ("zb-h2",),
    ),
}


def planned(folder: Path, name: str, num_ranks: int, num_microbatches: int) -> str:
    """Write a plan with an R before every backward; return its path."""
    schedule = with_recomputation(build(name, num_ranks=num_ranks, num_microbatches=num_microbatches))
    file = folder / f"{name}.json"
    file.write_text(json.dumps(schedule_content(schedule)))
    return str(file)


@pytest.mark.parametrize("name", some(ROWS, "dropout", "two stages per rank"))
def test_same_bits_as_stock(ranks: RankPool, tmp_path: Path, name: str) -> None:
    """By the flag, and by the file of a plan."""
    layout, num_microbatches, options, (first, *others) = ROWS[name]
    plans = (planned(tmp_path, schedule, layout.pipeline, num_microbatches) for schedule in others)
    runs = [None, f"{first} {EARLY}", *plans]
    results = ranks.run(layout.num_ranks, train, layout.flags(num_microbatches, options), runs, timeout=200)
    assert_same_bits(results, runs)


@pytest.mark.parametrize("options", ["--calculate-per-token-loss", pytest.param("--bf16", marks=pytest.mark.full)])
def test_same_weights_as_stock_on_a_v(ranks: RankPool, tmp_path: Path, options: str) -> None:
    layout, runs = Layout(2, num_layers=4), [None, f"zb-v {EARLY}", planned(tmp_path, "v-half", 2, 4)]
    results = ranks.run(2, train, layout.flags(4, f"{UNIFORM} {options}"), runs, timeout=200)
    assert_same_model(results, runs, layout)


@pytest.mark.full
@pytest.mark.parametrize("options", [UNIFORM, PAIRS_OF_LAYERS, BLOCK])
def test_dropout_on_a_v_is_that_of_backwards_which_recompute(ranks: RankPool, options: str) -> None:
    """Stock has another order of forwards, in which the stages of a rank draw other masks."""
    runs = ["zb-v", f"zb-v {EARLY}"]
    results = ranks.run(2, train, Layout(2, num_layers=8).flags(4, f"{options} {DROPOUT}"), runs, timeout=200)
    assert_same_bits(results, runs)


@pytest.mark.full
@pytest.mark.parametrize(("options", "limit"), [(UNIFORM, "1p"), (BLOCK, "1p"), (UNIFORM, "1.01p")])
def test_plans_of_a_run_compute_again_early(ranks: RankPool, options: str, limit: str) -> None:
    """``zb-auto`` measures R, and plans with it."""
    layout, runs = Layout(2, num_layers=4), [None, f"zb-auto {EARLY} --zero-bubble-memory-limit {limit}"]
    flags = layout.flags(5, f"--train-iters {SWITCHED} {options} {DROPOUT}")
    results = ranks.run(2, train_and_wait_for_the_plan, flags, runs, timeout=120)
    assert_same_bits([outcomes for outcomes, _ in results], runs, SWITCHED)
    plans = results[0][1]
    assert plans and all("switched to the planned schedule" in said and ", with R" in said for said in plans)
    if limit == "1.01p":
        assert all("fused backwards" in said for said in plans), "W needs many times what F has saved"


def gradients_of_checkpoints(_rank: int, early: bool) -> tuple[list[str], list[str]]:
    """Run two checkpoints with dropout, of which one has an output without gradient; return what ran, and gradients."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import checkpoint, model_parallel_cuda_manual_seed

    from megatron.zero_bubble.integration.adapter.recompute import recompute

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    weight = torch.randn(3, 3, requires_grad=True)
    ran = []

    def layer(name: str, x: torch.Tensor, other: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        ran.append(name)
        return torch.nn.functional.dropout(x @ weight, 0.5), torch.arange(3)

    x = torch.randn(2, 3, requires_grad=True)
    first, _ = checkpoint(lambda *args: layer("first", *args), False, x, None)
    second, _ = checkpoint(lambda *args: layer("second", *args), False, first, None)
    y = second.square().sum()
    if early:
        recompute(y)
        ran.append("gradient")
    y.backward()
    assert x.grad is not None and weight.grad is not None
    return ran, [str(grad.flatten().tolist()) for grad in (x.grad, weight.grad)]


def test_a_backward_finds_what_was_recomputed(ranks: RankPool) -> None:
    (late, expected), (early, found) = (
        ranks.run(1, gradients_of_checkpoints, way, timeout=60)[0] for way in (False, True)
    )
    assert late == ["first", "second", "second", "first"]
    assert early == ["first", "second", "first", "second", "gradient"], "in the order of the forward, and only once"
    assert found == expected
