"""``zero-bubble plan``, ``compare`` and ``dry-run`` with sharded units."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron.zero_bubble.__main__ import main

Capture = pytest.CaptureFixture[str]
CONFIG = Path(__file__).parents[2] / "configs/gpt_1.5b.yaml"
TIMES = "--forward-ms 4 --backward-ms 4 --wgrad-ms 4"
SIZES = f"--num-ranks 4 --num-microbatches 8 {TIMES}"
JOB = (
    "--num-layers 16 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --micro-batch-size 1 "
    "--train-iters 10 --lr 1e-3 --mock-data --bf16 --pipeline-model-parallel-size 4 --global-batch-size 64 "
    "--num-virtual-stages-per-pipeline-rank 4 --use-distributed-optimizer --zero-bubble-schedule zero-pp"
)


def run(capsys: Capture, words: str) -> str:
    assert main(words.split()) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def refusal(capsys: Capture, words: str) -> str:
    assert main(words.split()) == 2
    return capsys.readouterr().err


def test_plan(capsys: Capture) -> None:
    words = f"plan --schedule zero-pp --num-chunks 4 {SIZES} --shard-weights --gather-ms 2 --reduce-ms 4"
    out = run(capsys, words)
    assert "8 replicas, units of 4 microbatches, 2 whole stages" in out
    assert "per rank: 10 gathers, 8 reductions, 13.000 ms together" in out
    assert "(the passes on this placement, the first gather and the last reduction)" in out
    found = json.loads(run(capsys, f"{words} --unit-microbatches 8 --whole-stages 1 --format json"))
    assert (found["unit_microbatches"], found["whole_stages"], found["replicas"]) == (8, 1, 8)
    assert found["gathers"] == [7] * 4 and found["reductions"] == [4] * 4
    assert found["collectives_ms"] == pytest.approx(7 * 0.5 + 4 * 1.0)


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zb-v"])
def test_reductions_of_a_schedule_without_units(capsys: Capture, schedule: str) -> None:
    out = run(capsys, f"plan --schedule {schedule} {SIZES} --shard-weights --unit-microbatches 4")
    assert "8 replicas, units of 4 microbatches, 2 whole stages" in out


def test_times_of_a_costs_file(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    times = {f"{name}_ms": 4.0 for name in ("forward", "backward", "wgrad")}
    file.write_text(json.dumps({**times, "gather_ms": [0.5] * 16, "reduce_ms": 4.0}))
    words = f"plan --schedule zero-pp --num-chunks 4 --num-ranks 4 --num-microbatches 8 --costs {file} --shard-weights"
    assert "13.000 ms together" in run(capsys, words)


def test_memory_limit_in_bytes_includes_weights(capsys: Capture) -> None:
    config = f"plan --schedule zero-pp --num-chunks 3 --config {CONFIG} --num-microbatches 16"
    words = f"{config} --shard-weights --replica-bandwidth 100 --memory-limit"
    out = run(capsys, f"{words} 100GiB")
    assert "A memory limit in bytes includes weights, gradients and optimizer" in out and "100 GiB: met" in out
    assert "weights and optimizer:" not in out and "GiB by rank, these and activations" in out
    assert "EXCEEDED" in run(capsys, f"{words} 1GiB")


def test_tensor_parallelism_of_the_same_gpus(capsys: Capture) -> None:
    """Four all-reduces per layer and microbatch, in each of which a rank sends 2 (8 - 1) / 8 of the hidden states."""
    out = run(capsys, f"plan --schedule breadth-first --config {CONFIG} --num-microbatches 8 --shard-weights")
    words = CONFIG.read_text().split()
    shape = {
        name: int(words[words.index(f"{name}:") + 1]) for name in ("hidden-size", "seq-length", "micro-batch-size")
    }
    layers = 3  # on the fullest of 8 ranks
    states = shape["hidden-size"] * shape["seq-length"] * shape["micro-batch-size"]
    sent = 4 * 2 * 7 / 8 * 2 * states * layers * 8 * 8 / 2**30
    assert f"Tensor parallelism over 8 GPUs, instead of replicas, would send {sent:.4g} GiB per rank" in out


def test_compare_lists_them_beside_whole_weights(capsys: Capture) -> None:
    table = json.loads(run(capsys, f"compare {SIZES} --max-chunks 2 --shard-weights --equal-passes --format json"))
    rows = {row["schedule"]: row for row in table["rows"]}
    assert rows["zero-pp x2 sharded"]["gathers"] == 2 and rows["zero-pp x2 sharded"]["reductions"] == 4
    assert rows["zero-pp x2"]["gathers"] is None
    assert "zb-h1 sharded" not in rows


def test_dry_run_counts_shards(capsys: Capture) -> None:
    def weights(more: str) -> float:
        out = run(capsys, f"dry-run --gpus-per-node 16 --gpu h100 -- {JOB} {more}")
        assert ("Sharded units, 1 whole stages" in out) == bool(more)
        return float(out[out.index("pipeline rank ranks") :].splitlines()[1].split()[-2])

    assert weights("--zero-bubble-shard-weights --zero-bubble-whole-stages 1") < weights("")


def test_dry_run_counts_experts_by_their_replicas(capsys: Capture) -> None:
    """Four replicas: with experts divided over all of them, these stay whole, and only the rest is sent."""

    def sent(ranks: int) -> float:
        experts = f"--num-experts 16 --moe-token-dispatcher-type alltoall --expert-model-parallel-size {ranks}"
        job = f"{JOB} {experts} --zero-bubble-shard-weights --zero-bubble-whole-stages 1"
        out = run(capsys, f"dry-run --gpus-per-node 16 --gpu h100 -- {job}")
        found = re.search(r"([0-9.]+) GiB sent to 3 replicas", out)
        assert found is not None
        return float(found[1])

    assert sent(4) < sent(2) / 2


@pytest.fixture
def with_experts(tmp_path: Path) -> str:
    """The flags of a model whose experts four replicas have together."""
    model = "num-layers: 16\nhidden-size: 1024\nnum-attention-heads: 8\nseq-length: 2048\nmicro-batch-size: 1\n"
    (tmp_path / "model.yaml").write_text(f"{model}vocab-size: 32000\nnum-experts: 16\nexpert-model-parallel-size: 4\n")
    sizes = "--num-ranks 4 --num-microbatches 8"
    return f"plan --schedule zero-pp --num-chunks 2 {sizes} --config {tmp_path}/model.yaml --gpu h100 --shard-weights"


def test_plan_of_experts(capsys: Capture, with_experts: str) -> None:
    whole, shared = (run(capsys, f"{with_experts} --replica-bandwidth 40 --replicas {count}") for count in (4, 8))
    assert "The 4 replicas have one copy of the experts together, which stay whole: only the rest is sharded." in whole
    assert "Experts are sharded over the 2 copies of them that the 8 replicas have." in shared
    static = [
        max(
            map(float, out.partition("GiB by rank, shards and whole weights and gradients: ")[2].split("\n")[0].split())
        )
        for out in (whole, shared)
    ]
    assert static[1] < static[0]
    assert "--replicas must be a multiple of 4, the replicas that have one copy of the experts together; got 6" in (
        refusal(capsys, f"{with_experts} --replicas 6")
    )


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("--schedule zero-pp --gather-ms 1", "--gather-ms applies only to --shard-weights"),
        ("--schedule zb-h1 --unit-microbatches 4", "--unit-microbatches is for zero-pp, or for --shard-weights"),
        ("--schedule zb-h1 --shard-weights", "sharded units need 2 or more stages per rank"),
        ("--schedule zero-pp --shard-weights --whole-stages 0", "--whole-stages must be from 1 to 1,000,000; got 0"),
        ("--schedule zero-pp --shard-weights --gather-ms 1 --replica-bandwidth 1", "leave out either"),
    ],
)
def test_refused(capsys: Capture, words: str, what: str) -> None:
    assert what in refusal(capsys, f"plan {SIZES} {words}")


def test_limit_in_microbatches_is_one_of_activations(capsys: Capture) -> None:
    words = f"plan --schedule zero-pp --num-chunks 3 --config {CONFIG} --num-microbatches 16 --shard-weights"
    out = run(capsys, f"{words} --memory-limit 2p")
    assert "memory limit 8.652 microbatches" in out and ": met, peak 8 microbatches" in out


def test_stages_per_rank_and_whole_stages_are_chosen(capsys: Capture) -> None:
    words = f"plan --schedule zero-pp {SIZES} --shard-weights --gather-ms 2 --reduce-ms 4 --whole-stages auto"
    found = json.loads(run(capsys, f"{words} --num-chunks auto --format json"))
    assert len(found["stage_to_rank"]) // 4 == 4 and found["whole_stages"] == 2
    vee = json.loads(run(capsys, f"plan --schedule zb-v {SIZES} --shard-weights --num-chunks auto --format json"))
    assert vee["num_stages"] == 2 * vee["num_ranks"], "a V has no number of stages to choose"
    assert "--num-chunks auto applies only to" in refusal(capsys, f"plan --schedule zero-pp {SIZES} --num-chunks auto")


@pytest.mark.parametrize("flag", ["--whole-stages", "--num-chunks"])
def test_counts_are_numbers_or_auto(capsys: Capture, flag: str) -> None:
    with pytest.raises(SystemExit):
        main(f"plan {SIZES} --schedule zero-pp {flag} two".split())
    assert f"{flag}: it is a number, or auto; got 'two'" in capsys.readouterr().err


def test_compare_refuses_a_size_of_units_without_sharded_units(capsys: Capture) -> None:
    said = refusal(capsys, f"compare {SIZES} --unit-microbatches 2")
    assert "--unit-microbatches applies only to --shard-weights" in said
