"""Tests of training on GPUs: over NCCL with one GPU per rank, and over gloo with a shared GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --global-batch-size 16 --train-iters 5 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 255 --make-vocab-size-divisible-by 8 --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 "
    "--pipeline-model-parallel-size 2 --transformer-impl local --zero-bubble-device cuda"
)

pytestmark = pytest.mark.timeout(300)


def environment() -> dict[str, str]:
    """The environment of this process, with this checkout first on Python's path; megatron-core may be there, too."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def train(folder: Path, *flags: str, script: str = "scripts/pretrain_gpt.py") -> list[tuple[float, float]]:
    """Train five steps on two ranks; return losses and gradient norms."""
    metrics = folder / f"{len(list(folder.iterdir()))}.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    exact = ["--zero-bubble-exact"] if "--zero-bubble-schedule" in flags else []
    flags = (*FLAGS.split(), "--metrics-file", str(metrics), *exact, *flags)
    subprocess.run([*command, str(ROOT / script), *flags], env=environment(), check=True)
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [(step["lm_loss"], step["grad_norm"]) for step in steps if step["kind"] == "train"]


def test_ranks_find_what_this_process_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/where/megatron-core/is")
    assert environment()["PYTHONPATH"] == os.pathsep.join((str(ROOT), "/where/megatron-core/is"))
    monkeypatch.delenv("PYTHONPATH")
    assert environment()["PYTHONPATH"] == str(ROOT)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [[], ["--bf16"]])
def test_two_ranks_on_one_gpu_over_gloo_equal_1f1b(tmp_path: Path, precision: list[str]) -> None:
    """The reference is our own 1F1B, because stock megatron-core cannot share a GPU over gloo."""
    shared = [*precision, "--distributed-backend", "gloo"]
    reference = train(tmp_path, "--zero-bubble-schedule", "1f1b", *shared)
    for schedule in ("zb-h1", "zb-h2"):
        assert train(tmp_path, "--zero-bubble-schedule", schedule, *shared) == reference


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs one GPU per rank")
@pytest.mark.parametrize("max_connections", ["1", "8"])
def test_two_gpus_over_nccl_equal_stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_connections: str) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", max_connections)
    reference = train(tmp_path)
    for schedule in ("1f1b", "zb-h1", "zb-h2"):
        assert train(tmp_path, "--zero-bubble-schedule", schedule) == reference
