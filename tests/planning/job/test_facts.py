"""Tests of the facts of a job: where they are from, and what is said of files of another job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.cli.megatron_job import checked_megatron_job
from megatron.zero_bubble.core.formats.costs import CostsFile
from megatron.zero_bubble.core.formats.facts import FACTS
from megatron.zero_bubble.core.formats.plan import read_plan_file
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig
from megatron.zero_bubble.planning.job.facts import facts_of, gpu_kind, job_facts, remarks

JOB = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --global-batch-size 8 --bf16 "
    "--pipeline-model-parallel-size 2 --vocab-size 100 --tokenizer-type NullTokenizer"
)
EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 32 --moe-layer-freq [0,1,1,1] --moe-token-dispatcher-type alltoall "
    "--disable-bias-linear --mtp-num-layers 1 --tensor-model-parallel-size 2 --sequence-parallel"
)


def test_the_table_has_all_of_them() -> None:
    args = checked_megatron_job(f"{JOB} {EXPERTS}".split(), 4, 4).args
    facts = facts_of(args, "h100")
    assert list(facts) and set(facts) == {fact.name for fact in FACTS if fact.of_passes}
    assert set(job_facts(args)) < {fact.name for fact in FACTS if not fact.of_passes}
    assert facts["layer_kinds"] == "tEEE" and facts["vocabulary_size"] == 100 and facts["experts_per_token"] == 2


def test_gpus_have_the_names_of_the_estimates() -> None:
    assert gpu_kind("NVIDIA H100 80GB HBM3") == "h100" and gpu_kind("NVIDIA L40S") == "NVIDIA L40S"
    assert gpu_kind("NVIDIA GB200") == "gb200" and gpu_kind("AMD Instinct MI300X") == "mi300x"
    for other in ("NVIDIA GH200 480GB", "NVIDIA RTX A1000"):
        assert gpu_kind(other) == other


def test_a_plan_of_another_job_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, advise = tmp_path / "plan.json", "advise --gpus-per-node 2 --quick --write"
    assert main([*advise.split(), str(file), "--row", "1", "--", *JOB.split()]) == 0
    config = ZeroBubbleConfig(schedule_file=str(file))
    facts = read_plan_file(file).facts
    assert facts["hidden_size"] == 64 and not list(remarks(config, lambda: facts))
    words = (
        "hidden size: 64 there, 128 here; hidden size of an MLP: 256 there, 512 here; size of a head: 16 there, 32 here"
    )
    wide = {**facts, "hidden_size": 128, "ffn_hidden_size": 512, "head_size": 32}
    assert list(remarks(config, lambda: wide)) == [f"{file} has the plan of another job: {words}"]
    plan = f"--zero-bubble-schedule {file} --hidden-size 128"
    dry_run = ["dry-run", "--megatron-lm", "--gpus-per-node", "2", "--", *JOB.split(), *plan.split()]
    capsys.readouterr()
    assert main(dry_run) == 0
    assert f"has the plan of another job: {words}" in capsys.readouterr().out


def test_costs_of_another_job_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "costs.json"
    costs = {"forward_ms": 1, "backward_ms": 1, "wgrad_ms": 1, "facts": {"num_layers": 8, "gpu": "b200"}}
    file.write_text(json.dumps(costs))
    assert main(f"advise --gpus-per-node 2 --quick --costs {file} -- {JOB}".split()) == 0
    assert f"The costs in {file} are of another job: layers: 8 there, 4 here." in capsys.readouterr().out
    config = ZeroBubbleConfig("zero-pp", num_chunks=2, costs_file=str(file))
    assert list(remarks(config, lambda: {"num_layers": 4})) == [
        f"{file} has the costs of another job: layers: 8 there, 4 here"
    ]


def test_costs_per_layer_of_another_model_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "costs.json"
    part = {"forward_ms": 1, "backward_ms": 1, "wgrad_ms": 1}
    file.write_text(json.dumps({"layers": "tttttttt", "parts": {"t": part}}))
    assert CostsFile.parse(file.read_text()).layers is not None
    assert main(f"advise --gpus-per-node 2 --quick --costs {file} -- {JOB}".split()) == 2
    assert f"{file} is of 8 layers, and the job has 4; record the costs of this job" in capsys.readouterr().err
