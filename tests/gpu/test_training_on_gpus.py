"""Jobs of torchrun on GPUs over NCCL, compared with stock megatron-core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.zero_bubble.engine.platforms.cuda import nccl_shares_gpus

ROOT = Path(__file__).resolve().parents[2]
ODD = "tests/gpu/pretrain_oddly.py"
FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --global-batch-size 16 --train-iters 5 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 255 --make-vocab-size-divisible-by 8 --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 "
    "--transformer-impl local --zero-bubble-device cuda"
)

pytestmark = pytest.mark.timeout(300)


CHECKOUT = (str(ROOT), str(ROOT / "examples"))


def environment() -> dict[str, str]:
    """The environment of this process, with this checkout first on Python's path; megatron-core may be there, too."""
    paths = [*CHECKOUT, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def run(folder: Path, *flags: str, script: str = "scripts/pretrain_gpt.py", ranks: int = 2) -> Path:
    """Train five steps; return the file with the metrics."""
    metrics = folder / f"{len(list(folder.iterdir()))}.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    exact = ["--zero-bubble-exact"] if "--zero-bubble-schedule" in flags else []
    size = ["--pipeline-model-parallel-size", str(ranks)]
    flags = (*FLAGS.split(), *size, "--metrics-file", str(metrics), *exact, *flags)
    subprocess.run([*command, str(ROOT / script), *flags], env=environment(), check=True)
    return metrics


def train(folder: Path, *flags: str, script: str = "scripts/pretrain_gpt.py", ranks: int = 2) -> list[tuple[Any, ...]]:
    """Train five steps; return losses and gradient norms, whether a step was skipped, and losses of evaluations."""
    steps = map(json.loads, run(folder, *flags, script=script, ranks=ranks).read_text().splitlines())
    compared = ("kind", "iteration", "lm_loss", "grad_norm", "skipped")
    return [tuple(step.get(name) for name in compared) for step in steps if step["kind"] != "bubble"]


def test_ranks_find_what_this_process_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/where/megatron-core/is")
    assert environment()["PYTHONPATH"] == os.pathsep.join((*CHECKOUT, "/where/megatron-core/is"))
    monkeypatch.delenv("PYTHONPATH")
    assert environment()["PYTHONPATH"] == os.pathsep.join(CHECKOUT)


def needs_gpus(number: int) -> pytest.MarkDecorator:
    enough = torch.cuda.device_count() >= (1 if nccl_shares_gpus() else number)
    return pytest.mark.skipif(not enough, reason="NCCL needs one GPU per rank")


@pytest.mark.gpu
@needs_gpus(2)
@pytest.mark.parametrize("max_connections", ["1", "8", "32"])
def test_two_gpus_over_nccl_equal_stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_connections: str) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", max_connections)
    reference = train(tmp_path)
    for schedule in ("1f1b", "zb-h1", "zb-h2"):
        assert train(tmp_path, "--zero-bubble-schedule", schedule) == reference


@pytest.mark.gpu
@needs_gpus(4)
@pytest.mark.parametrize("max_connections", ["1", "32"])
def test_four_gpus_over_nccl_equal_stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_connections: str) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", max_connections)
    reference = train(tmp_path, ranks=4)
    for schedule in ("1f1b", "zb-h1", "zb-h2"):
        assert train(tmp_path, "--zero-bubble-schedule", schedule, ranks=4) == reference


@pytest.mark.gpu
@needs_gpus(2)
@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved-1f1b"])
def test_evaluations_over_nccl_equal_stock(tmp_path: Path, schedule: str) -> None:
    chunks = ("--num-virtual-stages-per-pipeline-rank", "2") if schedule == "interleaved-1f1b" else ()
    flags = (*chunks, "--eval-iters", "2", "--eval-interval", "2")
    reference = train(tmp_path, *flags)
    assert train(tmp_path, *flags, "--zero-bubble-schedule", schedule) == reference
    assert {step[0] for step in reference} > {"train"}, "the run must evaluate"


@pytest.mark.gpu
@needs_gpus(2)
@pytest.mark.parametrize("schedule", ["zb-h2", "zb-v"])
def test_post_validation_over_nccl_survives_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str) -> None:
    monkeypatch.setenv("CONDITION", "nan")
    flags = ("--zero-bubble-schedule", schedule, "--clip-grad", "100", "--fp16", "--initial-loss-scale", "1024")
    reference = train(tmp_path, *flags, script=ODD)
    assert [step[-1] for step in reference] == [False, False, True, False, False]
    assert train(tmp_path, *flags, "--zero-bubble-post-validation", script=ODD) == reference


@pytest.mark.gpu
@needs_gpus(4)
def test_eager_communicators_do_not_deadlock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan with two microbatches on four ranks would deadlock with one communicator per direction."""
    flags = ("--zero-bubble-schedule", "interleaved-1f1b", "--num-virtual-stages-per-pipeline-rank", "2")
    size = ("--num-layers", "8", "--global-batch-size", "4")
    reference = train(tmp_path, *flags, *size, ranks=4)
    monkeypatch.setenv("CONDITION", "bound")
    assert train(tmp_path, *flags, *size, script=ODD, ranks=4) == reference


@pytest.mark.gpu
@needs_gpus(2)
@pytest.mark.parametrize("options", [["nccl-ctas", "1"], ["nccl-ctas", "32"], ["post-receives", "late"]])
def test_options_of_transfers_do_not_change_results(tmp_path: Path, options: list[str]) -> None:
    name, value = options
    reference = train(tmp_path, "--zero-bubble-schedule", "zb-h1")
    assert train(tmp_path, "--zero-bubble-schedule", "zb-h1", f"--zero-bubble-{name}", value) == reference


@pytest.mark.gpu
@needs_gpus(2)
def test_no_warning_about_point_to_point_operations(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, "--zero-bubble-schedule", "zb-h1")
    assert "unbatched P2P" not in "".join(capfd.readouterr())


@pytest.mark.gpu
@needs_gpus(2)
def test_a_rank_that_hangs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CONDITION", "hang")
    with pytest.raises(subprocess.CalledProcessError):
        run(tmp_path, "--zero-bubble-schedule", "zb-h1", "--distributed-timeout-minutes", "1", script=ODD)
    shown = "".join(capfd.readouterr())
    assert "zero-bubble: rank 0: pipeline rank 0 could not run 0B" in shown
    assert "did not arrive from pipeline rank 1 on channel 1>0 (the GPU has waited 5" in shown


@pytest.mark.gpu
@needs_gpus(2)
def test_graphs_over_nccl_equal_runs_without(tmp_path: Path) -> None:
    """The first three steps run without graphs, the others repeat them."""
    flags = ("--zero-bubble-schedule", "zb-v", "--bf16")
    assert train(tmp_path, *flags, "--cuda-graph-impl", "local") == train(tmp_path, *flags)
