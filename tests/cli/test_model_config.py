"""``plan`` and ``compare`` for configurations of models with latent attention, experts, predictions, or a pattern."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.cli.model_config import read_model
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Placement
from tests.cli.test_plan_and_compare import run_json

Capture = pytest.CaptureFixture[str]
SHAPES: dict[str, object] = {
    "hidden-size": 1024,
    "num-attention-heads": 16,
    "seq-length": 4096,
    "micro-batch-size": 1,
    "global-batch-size": 8,
    "pipeline-model-parallel-size": 4,
    "num-experts": 16,
    "expert-model-parallel-size": 8,
    "moe-router-topk": 4,
    "moe-ffn-hidden-size": 512,
    "multi-latent-attention": True,
    "kv-lora-rank": 512,
    "vocab-size": 65536,
    "bf16": True,
}
DEEPSEEK = SHAPES | {"num-layers": 16, "moe-layer-freq": "([0]*3+[1]*13)", "mtp-num-layers": 1}
HYBRID = SHAPES | {"hybrid-layer-pattern": "MEG-*E+-MEME/*E", "moe-latent-size": 256}


def written(tmp_path: Path, flags: dict[str, object]) -> str:
    file = tmp_path / "model.yaml"
    file.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in flags.items()))
    return str(file)


def plan(capsys: Capture, file: str, *more: str) -> dict[str, Any]:
    return run_json(capsys, "plan", "--config", file, "--gpu", "h100", "--num-ranks", "4", *more)


def test_layouts_have_multi_token_prediction(capsys: Capture, tmp_path: Path) -> None:
    found = plan(capsys, written(tmp_path, DEEPSEEK), "--schedule", "zb-h1", "--layout", "auto")
    layout = found["pipeline_model_parallel_layout"]
    assert layout.count("m") == 1 and sum(found["layers_per_stage"]) == 16
    assert found["shorter_than"]["even_split"] > 0


def test_a_hybrid_model_is_planned_by_the_costs_of_its_letters(capsys: Capture, tmp_path: Path) -> None:
    file = written(tmp_path, HYBRID)
    read = read_model(file, 4, flash=True)
    assert read.model.kinds == tuple("MEG-*E+-MEME") and read.predictions == ("*E",)
    assert read.division.parts(Placement.linear(4)) == read.model.layers, "predictions are on the last stage"
    found = plan(capsys, file, "--schedule", "zb-v", "--layout", "auto")
    assert sum(found["layers_per_stage"]) == 12 and "m" not in found["pipeline_model_parallel_layout"]


def test_todays_models_are_compared(capsys: Capture, tmp_path: Path) -> None:
    rows = run_json(capsys, "compare", "--config", written(tmp_path, DEEPSEEK), "--gpu", "h100", "--max-chunks", "2")
    assert any(row["schedule"].startswith("zb-v") for row in rows["rows"])


def test_a_kind_of_layers_that_is_not_estimated_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="an estimate needs kinds of layers .*; got sparse attention in"):
        read_model(written(tmp_path, HYBRID | {"hybrid-layer-pattern": "MED-"}), 4, flash=True)


def test_a_misspelt_flag_is_refused(capsys: Capture, tmp_path: Path) -> None:
    assert main(["plan", "--schedule", "1f1b", "--config", written(tmp_path, SHAPES | {"num-layer": 4})]) == 2
    assert "--num-layer" in capsys.readouterr().err
