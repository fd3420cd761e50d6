"""``advise`` for jobs of today's models: layouts and slices with multi-token prediction, and without what refuses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from megatron.zero_bubble.cli.advise import advised, defaults
from megatron.zero_bubble.cli.job_figures import CostsInput
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.planning.job.changes import JobChanges
from megatron.zero_bubble.planning.setup import Cuts

JOB = shlex.split(
    "--num-layers 16 --hidden-size 1024 --num-attention-heads 16 --seq-length 8192 --micro-batch-size 1 "
    "--global-batch-size 32 --pipeline-model-parallel-size 4 --train-iters 10 --lr 1e-4 --vocab-size 65536 "
    "--num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 512 --expert-model-parallel-size 8 --bf16 "
    "--moe-token-dispatcher-type alltoall --mtp-num-layers 1 --cuda-graph-impl full_iteration "
    "--transformer-impl transformer_engine --untie-embeddings-and-output-weights --swiglu "
)


def options(**more: object) -> object:
    found = defaults()
    for name, value in {"nodes": 4, "gpus_per_node": 8, "gpu": "h100", "quick": True, **more}.items():
        setattr(found, name, value)
    return found


def test_changes_may_do_without_what_refuses_them() -> None:
    """Graphs of whole iterations, which no schedule of this package has."""
    refused = advised(options(), JOB).advice  # type: ignore[arg-type]
    assert not any(row.change.is_ours for row in refused.rows)
    rows = advised(options(remedies=True), JOB).advice.rows  # type: ignore[arg-type]
    ours = [row for row in rows if row.change.is_ours]
    assert ours and all("--cuda-graph-impl" in row.change.drops for row in ours)


def test_searches_over_slices_and_layouts_know_multi_token_prediction() -> None:
    own = advised(options(), JOB).job  # type: ignore[arg-type]
    placement, costs = own.today.timeline.schedule.placement, own.costs
    assert costs.layers is not None and costs.layers.predictions == 1
    changes = {change.name: change for change in JobChanges(placement, costs, 2.0**36, 1e6).changes()}
    for name in ("zb-auto linear", "zb-auto vee", "zb-auto loop x2"):
        sliced, both = changes[f"{name}, slices"], changes[f"{name}, slices, layout"]
        assert isinstance(sliced.question.setup.cuts, Cuts) and both.question.by_cost
        assert both.numbers == sliced.numbers == "rounded differently"
    assert "zb-auto loop x3, slices" not in changes
    assert costs.layout(Placement.linear(4)) == (4, 4, 4, 5), "the last stage has the prediction"


def test_costs_of_a_run_have_no_part_for_multi_token_prediction(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    layer = {"forward_ms": 1.0, "backward_ms": 1.2, "wgrad_ms": 0.8}
    file.write_text(json.dumps({"layers": ["t*16"], "parts": {"t": layer, "loss": layer}}))
    costs = advised(options(costs=CostsInput(str(file))), JOB).job.costs  # type: ignore[arg-type]
    on = Placement.linear(4)
    assert costs.layout(on) == (4, 4, 4, 4) and costs.evenly().laid_out(on, (5, 4, 4, 3)).weights_on(on) is not None
