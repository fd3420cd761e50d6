"""Tests of the GPU that flags describe: its peak, its efficiency, its domain, and a measured time."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.cli.advise import defaults
from megatron.zero_bubble.cli.hardware import device_of
from megatron.zero_bubble.core.costs.devices import DEVICES
from megatron.zero_bubble.core.errors import UserError

JOB = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 "
    "--vocab-size 128000 --micro-batch-size 1 --global-batch-size 64 --pipeline-model-parallel-size 4 --bf16 "
    "--tensor-model-parallel-size 2 --sequence-parallel --train-iters 9 --lr 1e-4 --tokenizer-type NullTokenizer"
).split()


def device(**given: object) -> Any:
    return device_of(argparse.Namespace(**{**vars(defaults()), **given}))


def test_a_domain_is_a_node_or_the_same_part_of_every_rack() -> None:
    assert device(nodes=4, gpus_per_node=4).domain == 4, "two nodes of 4 H100 share no links"
    for nodes, domain in ((16, 64), (18, 72), (64, 64), (5, 20), (2, 8)):
        assert device(gpu="gb200", nodes=nodes, gpus_per_node=4).domain == domain, nodes
    assert device(gpu="gb200", nodes=2, gpus_per_node=64).domain == 64


def test_a_peak_and_an_efficiency_replace_those_of_the_gpu() -> None:
    own = device(gpu="h200", tflops=362.0, efficiency=0.5)
    assert own.tflops == 362 and own.fp8_tflops == pytest.approx(362 * 1979 / 989) and own.efficiency == 0.5
    assert own.memory_tbs == DEVICES["h200"].memory_tbs
    linked = device(link_bandwidth=100.0, network_bandwidth=12.5)
    assert (linked.link_gbs, linked.node_gbs, linked.network_gbs) == (100, 100, 12.5)
    for wrong in ({"tflops": 0.0}, {"efficiency": 0.0}, {"efficiency": 1.5}):
        with pytest.raises(UserError, match=f"--{next(iter(wrong))} "):
            device(**wrong)


def advice(capsys: pytest.CaptureFixture[str], *own: str) -> dict[str, Any]:
    options = ("advise", "--gpus-per-node", "8", "--quick", "--format", "json", *own)
    assert main([*options, "--", *JOB]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["job"]
    return found


def test_a_measured_time_scales_the_job_and_its_changes(capsys: pytest.CaptureFixture[str]) -> None:
    plain = advice(capsys)
    measured = advice(capsys, "--measured-ms", f"{2 * plain['makespan_ms']}")
    assert measured["makespan_ms"] == pytest.approx(2 * plain["makespan_ms"], rel=1e-3)
    assert measured["tokens_per_s_per_gpu"] == pytest.approx(plain["tokens_per_s_per_gpu"] / 2, rel=1e-3)
    assert 0.3 < plain["mfu"] < 0.65 and measured["mfu"] == pytest.approx(plain["mfu"] / 2, rel=1e-3)
    assert measured["tflops_per_gpu"] == pytest.approx(989 * measured["mfu"])
    assert any("takes the measured" in note for note in measured["notes"])
    assert any("TFLOPS at 32% in matrix products" in note for note in measured["notes"]), measured["notes"]


def test_a_time_that_no_pace_gives_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    assert main(["advise", "--gpus-per-node", "8", "--measured-ms", "0.01", "--quick", "--", *JOB]) == 2
    assert "must be the time of an iteration of this job in ms; got 0.01" in capsys.readouterr().err
    assert main(["advise", "--measured-ms", "9", "--costs", str(tmp_path / "costs.json"), "--", *JOB]) == 2
    assert "--measured-ms scales estimates" in capsys.readouterr().err


def test_a_precision_is_named_and_makes_a_job_faster(capsys: pytest.CaptureFixture[str]) -> None:
    times = []
    advise = ["advise", "--gpus-per-node", "8", "--gpu", "B200", "--quick", "--format", "json", "--", *JOB]
    for flags in ([], ["--fp8-format", "hybrid"], ["--fp4-format", "e2m1"]):
        assert main([*advise, *flags]) == 0
        job = json.loads(capsys.readouterr().out)["job"]
        times.append(job["makespan_ms"])
        assert any("Linear layers compute in" in note for note in job["notes"]) == bool(flags)
    assert times[0] > 1.2 * times[1] and times[1] > 1.05 * times[2]
