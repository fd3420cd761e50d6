"""Tests of the bench of real passes: it reports what it ran."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from bench.ranks import environment
from megatron.zero_bubble import PassCosts, PassMemory, build, simulate
from megatron.zero_bubble.core.search import fit

ROOT = Path(__file__).parents[2]
ARGUMENTS = "--hidden-size 64 --vocab-size 1024 --num-layers 4 --num-microbatches 4 --rounds 2 --only".split()


@pytest.mark.full
@pytest.mark.timeout(300)
def test_fitted_schedule_runs_in_the_predicted_order(tmp_path: Path) -> None:
    """The bench itself rejects passes in another order than that of its prediction."""
    file, only = tmp_path / "real_compute.json", ("zb-v fitted", "zb-h1, vocabulary 2")
    command = [sys.executable, "-m", "bench.real_compute", *ARGUMENTS, *only, "--output", str(file)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    variants = json.loads(file.read_text())["results"][0]["variants"]
    own, stock = variants["zb-v fitted"], variants["stock 1f1b"]

    plain, published = (build(name, num_ranks=2, num_microbatches=4) for name in ("1f1b", "zb-v"))
    memory = PassMemory.uniform(published.placement, 1.0)
    fitted = fit(published, _costs(own["fitted_to"]), memory, objective="makespan")
    rounds = zip(own["costs"], stock["costs"], strict=True)
    ratios = [simulate(fitted, _costs(a)).makespan_ms / simulate(plain, _costs(b)).makespan_ms for a, b in rounds]
    assert own["predicted_time_over_stock"] == pytest.approx(median(ratios), rel=1e-12)
    assert own["bound_over_predicted_stock"] <= own["predicted_time_over_stock"]

    divided = variants["zb-h1, vocabulary 2"]
    assert divided["predicted_time_over_stock"] > 0
    for costs in divided["costs"]:
        assert len(costs["vocabulary"]["output_ms"]) == 2 and min(costs["vocabulary"]["output_wgrad_ms"]) > 0


@pytest.mark.full
@pytest.mark.timeout(300)
def test_variants_run_in_the_requested_sizes(tmp_path: Path) -> None:
    """In bfloat16, with the passes of the split variants recorded, and their memory."""
    file = tmp_path / "passes.json"
    words = "--num-ranks 1 --hidden-size 64 --num-layers 4 --num-microbatches 2 --rounds 1 --seq-length 64".split()
    words += ["--dtype", "bfloat16", "--flags=--recompute-activations", "--output", str(file)]
    command = [sys.executable, "-m", "bench.real_compute", *words]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(file.read_text())["results"]
    assert (result["seq_length"], result["dtype"], result["flags"]) == (64, "bfloat16", "--recompute-activations")
    variants = result["variants"]
    for variant in (variants["1f1b, split"], variants["1f1b, split, exact"]):
        assert variant["costs"] and len(variant["rounds_ms"]) == 1
        assert 0 < variant["allocated_gib"] <= variant["reserved_gib"]


def _costs(figures: dict[str, Any]) -> PassCosts:
    times = (tuple(figures[name]) for name in ("forward_ms", "backward_ms", "wgrad_ms"))
    return PassCosts(*times, figures["comm_ms"], message_ms=figures["message_ms"])
