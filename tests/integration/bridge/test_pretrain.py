"""Megatron-Bridge's own ``pretrain()`` under a schedule: its printed lines and weights equal those of its stock run.

The checkout is the one that ``ZB_BRIDGE`` names, on the newest megatron-core of ``ZB_MEGATRON_LM``. All runs are in the
same two processes, one after the other.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.bridge.runs import NUM_RANKS, VARIABLE, BridgeRun, bridge, core, run_bridge
from tests.helpers.megatron_lm import Log

pytestmark = [
    pytest.mark.skipif(
        bridge() is None or core() is None,
        reason=f"{VARIABLE} names no checkout of Megatron-Bridge, or ZB_MEGATRON_LM none of 0.20 or newer",
    ),
    pytest.mark.timeout(900),
]
TWO_CHUNKS = {
    "model.virtual_pipeline_model_parallel_size": 2,
    "model.overlap_p2p_comm": True,
    "model.batch_p2p_comm": False,
}
DISTRIBUTED = {
    "optimizer.use_distributed_optimizer": True,
    "ddp.use_distributed_optimizer": True,
    "ddp.overlap_grad_reduce": True,
    "ddp.overlap_param_gather": True,
    "model.share_embeddings_and_output_weights": True,
}
BF16 = {"mixed_precision": "bf16_mixed"}
EXPERTS = {
    "model.num_moe_experts": 4,
    "model.moe_router_topk": 2,
    "model.moe_token_dispatcher_type": "alltoall",
    "model.moe_router_load_balancing_type": "aux_loss",
    "model.moe_aux_loss_coeff": 0.01,
    "model.add_bias_linear": False,
}
RECOMPUTED = {
    "model.recompute_granularity": "full",
    "model.recompute_method": "uniform",
    "model.recompute_num_layers": 1,
}
# On a V, other ranks add the squares of the same gradients, so that a clipped gradient may differ in its last bit.
UNCLIPPED = {"optimizer.clip_grad": 0.0}

DIVIDED = {"ZERO_BUBBLE_VOCABULARY_PARALLEL": "1"}


def under(schedule: str) -> dict[str, str]:
    return {"ZERO_BUBBLE_SCHEDULE": schedule, "ZERO_BUBBLE_EXACT": "1"}


def resumed(folder: Path, name: str) -> dict[str, Any]:
    """Settings of a run that takes the second half from the checkpoint of another."""
    return {"checkpoint.load": str(folder / name), "checkpoint.ckpt_step": 2}


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Log]:
    folder = tmp_path_factory.mktemp("bridge")
    stock, ours = (resumed(folder, name) for name in ("of-stock", "of-zb-h1"))
    unequal = {"model.num_layers": 5}
    tuned = {"checkpoint.pretrained_checkpoint": str(folder / "of-stock")}
    adapted = tuned | resumed(folder, "adapters")  # on a V, ranks would draw other adapters
    logs = run_bridge(
        [
            BridgeRun("stock", {}, {"checkpoint.save": str(folder / "of-stock")}),
            BridgeRun("zb-h1", under("zb-h1"), {"checkpoint.save": str(folder / "of-zb-h1")}),
            BridgeRun("stock from zb-h1", {}, ours),
            BridgeRun("zb-h1 from stock", under("zb-h1"), stock),
            BridgeRun("interleaved stock", {}, TWO_CHUNKS),
            BridgeRun("interleaved-1f1b", under("interleaved-1f1b"), TWO_CHUNKS),
            BridgeRun("unclipped stock", {}, stock | UNCLIPPED),
            BridgeRun("zb-v", under("zb-v"), stock | UNCLIPPED),
            BridgeRun("zb-v from builder", under("zb-v"), stock | UNCLIPPED, from_builder=True),
            BridgeRun("zb-v on unequal stages", under("zb-v"), unequal),
            BridgeRun("distributed stock", {}, DISTRIBUTED),
            BridgeRun("distributed zb-h1", under("zb-h1"), DISTRIBUTED),
            BridgeRun("moe stock", {}, EXPERTS | BF16 | RECOMPUTED),
            BridgeRun("moe zb-h1", under("zb-h1"), EXPERTS | BF16 | RECOMPUTED),
            BridgeRun("divided vocabulary", under("zb-h1") | DIVIDED, UNCLIPPED | stock),
            BridgeRun("lora stock", {}, tuned | {"checkpoint.save": str(folder / "adapters")}, has_adapters=True),
            BridgeRun("lora zb-h1", under("zb-h1"), tuned, has_adapters=True),
            BridgeRun("unclipped lora stock", {}, adapted | UNCLIPPED, has_adapters=True),
            BridgeRun("lora zb-v", under("zb-v"), adapted | UNCLIPPED, has_adapters=True),
        ],
        folder,
    )
    last, log = list(logs.items())[-1]
    assert log.exit_codes == [0] * NUM_RANKS, f"{last}: {log.text[-6000:]}"
    return logs


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("zb-h1", "stock"),
        ("interleaved-1f1b", "interleaved stock"),
        ("distributed zb-h1", "distributed stock"),
        ("moe zb-h1", "moe stock"),
        ("zb-v", "unclipped stock"),
        ("zb-v from builder", "unclipped stock"),
        ("lora zb-h1", "lora stock"),
        ("lora zb-v", "unclipped lora stock"),
    ],
)
def test_a_run_equals_its_stock_run(logs: dict[str, Log], name: str, like: str) -> None:
    ours, stock = logs[name], logs[like]
    assert len(ours.figures) >= 5
    assert ours.figures == stock.figures
    assert ours.weights == stock.weights
    assert ours.of("zero-bubble: schedule ")[0].endswith(", for this run of Megatron-Bridge")
    assert not stock.of("zero-bubble: schedule ")


@pytest.mark.parametrize("name", ["stock from zb-h1", "zb-h1 from stock"])
def test_a_checkpoint_of_one_schedule_continues_under_the_other(logs: dict[str, Log], name: str) -> None:
    whole, half = logs["stock"], logs[name]
    assert half.weights == whole.weights
    after = [line for line in whole.figures if line not in half.figures]
    assert half.figures == [line for line in whole.figures if line in half.figures]
    assert [line.split()[1] for line in after] == ["1/", "2/", "loss"], after


def test_layers_that_do_not_divide_are_balanced(logs: dict[str, Log]) -> None:
    log = logs["zb-v on unequal stages"]
    assert {line.split()[2] for line in log.weights if "input_layernorm.weight" in line} == {
        f"decoder.layers.{number}.input_layernorm.weight" for number in range(1, 6)
    }
    assert len(log.figures) >= 5


def test_a_divided_vocabulary_gives_the_same_losses(logs: dict[str, Log]) -> None:
    """Up to rounding, because sums are in another order."""
    ours, stock = (_losses(logs[name]) for name in ("divided vocabulary", "unclipped stock"))
    assert len(stock) >= 5 and ours == pytest.approx(stock, rel=1e-5)


def _losses(log: Log) -> list[float]:
    return [float(loss) for line in log.figures for loss in re.findall(r"loss(?: value)?: ([0-9.]+E[-+][0-9]+)", line)]
