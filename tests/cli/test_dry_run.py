"""Tests of the dry run: its report on a job, and the same errors as the run's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from megatron.zero_bubble import PassCosts, PassMemory, Placement, build, simulate
from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.cli import planned_job
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.costs import costs_to_json
from megatron.zero_bubble.core.formats.plan import plan_to_json
from megatron.zero_bubble.core.plan import plan_of
from megatron.zero_bubble.core.plan.nccl import Ctas, collective_ctas
from megatron.zero_bubble.planning.job.arguments.checks import check
from megatron.zero_bubble.planning.job.arguments.parser import parse
from tests.helpers.sources import named

CONFIGS = Path(__file__).parents[2] / "configs"
JOB = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --train-iters 10 "
    "--lr 1e-3 --mock-data"
).split()
PIPELINE = ["--pipeline-model-parallel-size", "4", "--global-batch-size", "32"]
FOUR = ["--gpus-per-node", "4"]
Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, own: list[str], job: list[str]) -> str:
    assert main(["dry-run", *own, "--", *job]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def refusal(capsys: Capture, own: list[str], job: list[str]) -> str:
    assert main(["dry-run", *own, "--", *job]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


def rows(out: str) -> list[list[str]]:
    """Parse the table of pipeline ranks."""
    _, table = out.split("pipeline rank", 1)
    return [re.split(r"  +", line.strip()) for line in table.split("\n\n")[0].splitlines()[1:]]


def test_report_agrees_with_planner_and_estimate(capsys: Capture) -> None:
    """Table, plan and memory of a real job agree with ``zero-bubble plan`` and the estimate."""
    config = str(CONFIGS / "gpt_6.2b.yaml")
    out = run(capsys, ["--nodes", "2", "--gpu", "h100"], ["--config", config, *"--mock-data --vocab-size 1000".split(),
              *"--tokenizer-type NullTokenizer --zero-bubble-schedule zb-h1".split()])  # fmt: skip
    assert out.startswith("2 nodes x 8 processes = 16 ranks: tensor 1 x data 2 x pipeline 8\n")
    table = rows(out)
    assert [row[:4] for row in (table[0], table[1], table[7])] == [
        ["0", "0-1", "0", "0: embedding+3"],
        ["1", "2-3", "0", "1: 4"],
        ["7", "14-15", "1", "7: 3+loss"],
    ]
    # The same model with the same costs: 3 4 4 4 4 4 4 3 layers, 12 microbatches on each of two replicas.
    plan = ["plan", "--schedule", "zb-h1", "--config", config, "--gpu", "h100", "--num-microbatches", "12"]
    assert main(plan) == 0
    by_plan = capsys.readouterr().out
    kept = re.search(r"GiB by rank, activations: (.*)", by_plan)
    assert kept is not None
    # The last rank differs: its loss depends on the vocabulary, for which the plan assumes another size.
    assert [row[4] for row in table[1:7]] == [f"{float(gib):.1f}" for gib in kept[1].split()[1:7]]
    assert "zb-h1: 8 ranks, 12 microbatches" in out
    assert "Proved free of deadlock for 12 microbatches" in out


def test_first_rank_of_a_v_has_both_ends_of_the_model(capsys: Capture) -> None:
    out = run(capsys, FOUR, [*JOB, *PIPELINE, "--zero-bubble-schedule", "zb-v"])
    assert [row[3] for row in rows(out)] == ["0: embedding+1, 7: 1+loss", "1: 1, 6: 1", "2: 1, 5: 1", "3: 1, 4: 1"]


def test_without_a_schedule_megatrons_own_is_planned(capsys: Capture) -> None:
    assert "1f1b: 4 ranks, 16 microbatches" in run(capsys, FOUR, [*JOB, *PIPELINE])
    looped = run(capsys, FOUR, [*JOB, *PIPELINE, "--num-virtual-stages-per-pipeline-rank", "2"])
    assert "interleaved-1f1b: 4 ranks" in looped and "Megatron's built-in schedule, which is not proved" in looped
    one = run(capsys, FOUR, JOB)
    assert rows(one)[0][:4] == ["0", "0-3", "0", "0: embedding+8+loss"]


def test_zb_auto_is_planned_with_estimated_costs(capsys: Capture) -> None:
    out = run(capsys, FOUR, [*JOB, *PIPELINE, "--zero-bubble-schedule", "zb-auto", "--zero-bubble-placement", "vee"])
    assert "zb-auto: 4 ranks, 16 microbatches" in out
    out = run(capsys, FOUR, [*JOB, *PIPELINE, *"--zero-bubble-schedule zb-auto --zero-bubble-num-slices 4".split()])
    assert "zb-auto: 4 ranks, 16 microbatches of 4 slices" in out


def test_a_plan_that_was_searched_for_is_not_simulated_again(capsys: Capture) -> None:
    search = [*JOB, *PIPELINE, *"--zero-bubble-schedule zb-auto --zero-bubble-placement vee".split()]
    with mock.patch.object(planned_job, "timeline_of", side_effect=planned_job.timeline_of) as simulated:
        run(capsys, FOUR, search)
        assert simulated.call_count == 0
        run(capsys, FOUR, [*search, "--zero-bubble-offload", "50%"])
        assert simulated.call_count == 1


@pytest.mark.parametrize(
    "wrong",
    [
        "--pipeline-model-parallel-size 3",
        "--pipeline-model-parallel-size 4 --zero-bubble-schedule zb-9",
        "--pipeline-model-parallel-size 4 --zero-bubble-schedule zb-v --num-layers 4",
        "--tensor-model-parallel-size 2 --num-attention-heads 3",
        "--global-batch-size 3",
        "--no-such-flag",
        "--bf16 --fp16",
        "--data-path nowhere",
    ],
)
def test_invalid_jobs_get_the_runs_error(capsys: Capture, wrong: str) -> None:
    with pytest.raises(UserError) as caught:
        check(parse([*JOB, *wrong.split()]), 4)
    assert refusal(capsys, FOUR, [*JOB, *wrong.split()]) == f"zero-bubble dry-run: {caught.value}\n"


def test_proof_respects_the_number_of_hardware_queues(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    job = [*JOB, *PIPELINE, "--zero-bubble-schedule", "breadth-first"]
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    run(capsys, FOUR, job)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert "set it to 32, or choose another schedule" in refusal(capsys, FOUR, job)
    run(capsys, FOUR, [*job, "--zero-bubble-device", "cpu"])
    h1 = [*JOB, *PIPELINE, "--zero-bubble-schedule", "zb-h1", "--zero-bubble-post-validation"]
    assert "for 16 microbatches, with one hardware queue per GPU." in run(capsys, FOUR, h1)
    on_a_v = [*JOB, *PIPELINE, "--zero-bubble-schedule", "zb-v"]
    run(capsys, FOUR, on_a_v)
    late = [*on_a_v, "--zero-bubble-post-receives", "late"]
    assert "set it to 32, or choose another schedule" in refusal(capsys, FOUR, late)


def test_proof_respects_the_order_of_launches(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    job = [*JOB, *PIPELINE, "--zero-bubble-schedule", "breadth-first"]
    said = refusal(capsys, FOUR, job)
    assert "NCCL_LAUNCH_ORDER_IMPLICIT is 1, which has the same effect as one queue; set it to 0, or choose" in said
    run(capsys, FOUR, [*job, "--zero-bubble-device", "cpu"])
    h1 = [*JOB, *PIPELINE, "--zero-bubble-schedule", "zb-h1"]
    assert "for 16 microbatches, with one order for all transfers of a GPU." in run(capsys, FOUR, h1)


def test_schedule_file_of_another_size_is_rejected(capsys: Capture, tmp_path: Path) -> None:
    schedule = build("zb-h1", num_ranks=4, num_microbatches=8)
    file = tmp_path / "plan.json"
    file.write_text(plan_to_json(simulate(schedule, PassCosts.uniform(Placement.linear(4), 1, 1, 1)), None))
    job = [*JOB, *PIPELINE, "--zero-bubble-schedule-file", str(file)]
    assert "the job runs 4 pipeline ranks and 16 microbatches" in refusal(capsys, FOUR, job)
    assert "zb-h1: 4 ranks, 8 microbatches" in run(capsys, FOUR, [*job, "--global-batch-size", "16"])


def test_every_batch_size_of_a_ramp_up_is_proved(capsys: Capture) -> None:
    job = [*JOB, *PIPELINE, *"--rampup-batch-size 8 8 100 --zero-bubble-schedule zb-h1".split()]
    assert "Proved free of deadlock for 4 to 16 microbatches" in run(capsys, FOUR, job)


def test_memory_is_compared_with_the_gpus(capsys: Capture) -> None:
    config = str(CONFIGS / "gpt_6.2b.yaml")
    job = ["--config", config, "--mock-data", "--zero-bubble-schedule", "zb-h1"]
    own = ["--gpu-memory", "40GiB"]
    together = [float(row[7]) for row in rows(run(capsys, own, job))]
    assert max(together) < 40
    # A message is 2 bytes x 3 x 1024 tokens x 4096, and a rank in the middle has a few at a time.
    messages = [float(row[5]) for row in rows(run(capsys, own, job))]
    assert all(2 <= size * 2**30 / (2 * 3 * 1024 * 4096) <= 9 for size in messages)
    late = rows(run(capsys, own, [*job, "--zero-bubble-post-receives", "late"]))
    assert sum(float(row[5]) for row in late) < sum(messages)
    distributed = rows(run(capsys, ["--nodes", "2", *own], [*job, "--use-distributed-optimizer"]))
    # 2 + 4 bytes per parameter and 12 divided by two replicas, instead of 18.
    assert [float(row[6]) for row in distributed] == pytest.approx(
        [float(row[6]) * 12 / 18 for row in rows(run(capsys, own, job))], abs=0.1
    )
    error = refusal(capsys, ["--gpu-memory", "20GiB"], job)
    fullest = together.index(max(together))
    assert f"got {max(together):.3g} GiB on pipeline rank {fullest} (" in error
    assert "use a schedule with less memory" in error
    assert "--gpu-memory needs a size in bytes, such as 80GiB" in refusal(capsys, ["--gpu-memory", "1p"], job)


def test_experts_are_estimated(capsys: Capture) -> None:
    """What all of them keep, divided by the expert-parallel ranks, and what the all-to-alls take."""
    job = [*JOB, *PIPELINE, *"--zero-bubble-schedule zb-h1 --bf16 --num-experts 16 --moe-router-topk 2".split()]
    nodes = ["--nodes", "2", "--gpus-per-node", "8", "--gpu", "h100"]
    whole = run(capsys, nodes, job)
    assert "Experts are assumed to be balanced: 2 of 16 process each token.\n" in whole
    divided = [*job, *"--expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall".split()]
    own = run(capsys, nodes, divided)
    assert "The all-to-alls of 4 expert-parallel ranks, 4 per node, run at 340 GB/s within a node." in own
    near = run(capsys, [*nodes[:3], "2", *nodes[4:], "--nodes", "8", "--network-bandwidth", "25"], divided)
    assert "4 expert-parallel ranks, 2 per node, run at 340 GB/s within a node and 25 GB/s between nodes." in near
    sharded = run(capsys, nodes, [*divided, "--use-distributed-optimizer"])
    assert "Weights, gradients and optimizer take 9 bytes per parameter, those of experts 18." in sharded
    with_memory = [*nodes, "--gpu-memory"]
    assert "got 0.0" in refusal(capsys, [*with_memory, "1MiB"], job)
    assert run(capsys, [*with_memory, "80GiB"], job) == whole
    assert "--link-bandwidth must be above 0; got 0" in refusal(capsys, [*nodes, "--link-bandwidth", "0"], job)


def test_costs_file_replaces_the_estimate(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    placement = Placement.linear(4)
    memory = PassMemory.uniform(placement, 2.0**30, 2.0**29)
    costs = PassCosts.uniform(placement, 30.0, 20.0, 10.0)
    file.write_text(costs_to_json(costs, memory))
    job = [*JOB, *PIPELINE, "--zero-bubble-schedule", "zb-h1"]
    own = ["--costs", str(file)]
    out = run(capsys, [*FOUR, *own], job)
    assert f"Costs are from {file}." in out and "estimated" not in out
    assert rows(out)[0][4] == "4.0"
    makespan = simulate(build("zb-h1", num_ranks=4, num_microbatches=16), costs).makespan_ms
    assert f"zb-h1: 4 ranks, 16 microbatches, {makespan:,.1f} ms" in out
    file.write_text(costs_to_json(costs))
    assert "in bytes, which the --costs file does not have; got 80GiB" in refusal(
        capsys, [*FOUR, *own, "--gpu-memory", "80GiB"], job
    )
    counted = run(capsys, [*FOUR, *own], job)
    assert "microbatches of activations\n" in counted
    assert [row[4:] for row in rows(counted)] == [["4"], ["4"], ["4"], ["4"]]


def test_flags_of_megatron_lm_jobs_are_accepted(capsys: Capture) -> None:
    job = "--num-layers 16 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2".split()
    job += (
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model=x --use-mcore-models --context-parallel-size 2".split()
    )
    job += "--pipeline-model-parallel-size 4 --global-batch-size 32".split()
    own = ["--nodes", "4", *FOUR, "--megatron-lm"]
    out = run(capsys, own, [*job, "--zero-bubble-schedule", "zb-h1"])
    assert out.startswith("4 nodes x 4 processes = 16 ranks: tensor 1 x context 2 x data 2 x pipeline 4\n")
    assert "Not checked here, only by Megatron-LM: --use-mcore-models\n" in out
    looped = run(capsys, own, [*job, "--num-layers-per-virtual-pipeline-stage", "2"])
    assert rows(looped)[0][3] == "0: embedding+2, 4: 2"
    assert "invalid choice: 'tpu'" in refusal(capsys, own, [*job, "--zero-bubble-device", "tpu"])
    assert "--zero-bubble-trace x works only with a zero-bubble schedule to measure; got none" in refusal(
        capsys, own, [*job, "--zero-bubble-trace", "x"]
    )
    few = ["--nodes", "3", *FOUR, "--megatron-lm"]
    assert "tensor * pipeline * context parallel size, got 12 and 1 * 4 * 2" in refusal(capsys, few, job)
    ours = own[:-1]
    assert "invalid choice: 'HuggingFaceTokenizer'" in refusal(capsys, ours, job)
    assert "unrecognized arguments: --foo" in refusal(capsys, ours, [*JOB, "--foo"])


def test_launch_command_is_printed_per_node(capsys: Capture) -> None:
    own = ["--nodes", "2", "--gpus-per-node", "2", "--launch-command", "run --node-rank @node@ it"]
    out = run(capsys, own, [*JOB, *PIPELINE])
    assert out.endswith("\nnode 0: run --node-rank 0 it\nnode 1: run --node-rank 1 it\n")
    assert "--nodes must be 1 or more; got 0" in refusal(capsys, ["--nodes", "0"], JOB)


def test_estimate_counts_the_layers_of_each_stage(capsys: Capture) -> None:
    """10 layers on 4 ranks are placed as 2 3 3 2, and memory is proportional."""
    job = [*JOB, *PIPELINE, "--zero-bubble-schedule", "zb-h1", "--num-layers", "10", "--hidden-size", "8192"]
    out = run(capsys, FOUR, job)
    assert [row[3] for row in rows(out)] == ["0: embedding+2", "1: 3", "2: 3", "3: 2+loss"]
    # A layer has 12 h^2 parameters at 16 bytes (float32 and Adam); the vocabulary of bytes is small.
    layer = 12 * 8192**2 * 16 / 2**30
    assert [float(row[6]) for row in rows(out)] == pytest.approx([2 * layer, 3 * layer, 3 * layer, 2 * layer], abs=0.1)


OFFLOADED = [*JOB, *PIPELINE, "--hidden-size", "4096", "--seq-length", "4096", "--zero-bubble-schedule", "zb-h2"]


def test_offloading_divides_memory_between_device_and_host(capsys: Capture) -> None:
    kept = rows(run(capsys, FOUR, OFFLOADED))
    two = ["--nodes", "2", "--gpus-per-node", "4"]
    out = run(capsys, two, [*OFFLOADED, "--zero-bubble-offload", "all"])
    moved = rows(out)
    device, host = ([float(row[column]) for row in moved] for column in (4, -1))
    assert device[0] < 0.5 * float(kept[0][4]) and device[0] + host[0] >= float(kept[0][4])
    assert host == sorted(host, reverse=True), "a later rank has fewer microbatches in flight"
    of_nodes = [line.split() for line in out.split("on the host\n")[2].split("\n\n")[0].splitlines()]
    assert [line[0] for line in of_nodes] == ["0", "1"]
    assert [float(line[2]) for line in of_nodes] == pytest.approx(
        [2 * (host[0] + host[1]), 2 * (host[2] + host[3])], abs=0.3
    )
    assert "Copies to host memory and back are not in the times" in out
    assert "on the host" not in run(capsys, FOUR, OFFLOADED)


def test_limit_of_host_memory_is_checked(capsys: Capture) -> None:
    offload = ["--zero-bubble-offload", "all", "--zero-bubble-host-memory"]
    run(capsys, FOUR, [*OFFLOADED, *offload, "1000GiB"])
    text = refusal(capsys, FOUR, [*OFFLOADED, *offload, "1GiB"])
    assert "must fit in --zero-bubble-host-memory, 1GiB per rank; zb-h2 needs an estimated 14.9 GiB" in text
    assert "on pipeline rank 0, and 31.9 GiB on a node of 4 ranks; raise the limit, or lower the percentage" in text


def test_transfers_of_nccl_must_leave_half_of_the_gpu(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in the run, whose GPU has as many multiprocessors."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    costs = tmp_path / "costs.json"
    costs.write_text('{"forward_ms": 1, "backward_ms": 1, "wgrad_ms": 1, "output_ms": 0.2, "output_wgrad_ms": 0.2}')
    own = [*FOUR, "--gpu", "h100", "--costs", str(costs)]
    job = [*JOB, *PIPELINE, *"--zero-bubble-schedule zb-h1 --zero-bubble-vocabulary-parallel 2".split()]
    run(capsys, own, job)
    plan = plan_of(named("zb-h1", 4, vocabulary=2).make(16))
    with pytest.raises(UserError) as caught:
        collective_ctas(Ctas(16), plan, 132)
    text = refusal(capsys, own, [*job, "--zero-bubble-nccl-ctas", "16"])
    assert text == f"zero-bubble dry-run: {caught.value}\n"
    run(capsys, own, [*job, "--zero-bubble-nccl-ctas", "16", "--distributed-backend", "gloo"])


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-auto"])
def test_estimates_have_the_passes_of_the_vocabulary(capsys: Capture, schedule: str) -> None:
    job = [*JOB, *PIPELINE, "--distributed-backend", "gloo"]
    job += ["--zero-bubble-schedule", schedule, "--zero-bubble-vocabulary-parallel", "2"]
    assert "Vocabulary parallelism 2: the shards of the output layer are assumed" in run(capsys, FOUR, job)


def test_dry_run_does_not_load_torch() -> None:
    code = "import sys; from megatron.zero_bubble.__main__ import main; code = main(sys.argv[1:]); "
    code += "print('loaded', [name for name in ('torch', 'numpy') if name in sys.modules]); sys.exit(code)"
    job = ["dry-run", *FOUR, "--", *JOB, *PIPELINE, "--zero-bubble-schedule", "zb-h1"]
    done = subprocess.run(
        [sys.executable, "-c", code, *job], capture_output=True, text=True, env=os.environ, check=True
    )
    assert done.stdout.endswith("loaded []\n")


def test_balanced_microbatches_have_no_fixed_number(capsys: Capture) -> None:
    job = ["--zero-bubble-schedule", "zb-h1", "--zero-bubble-balance-microbatches", "--calculate-per-token-loss"]
    assert "a dry run needs the number of microbatches" in refusal(capsys, FOUR, [*JOB, *PIPELINE, *job])


def test_costs_per_layer_are_for_the_jobs_layout(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    layer = {"forward_ms": 3, "backward_ms": 2, "wgrad_ms": 1}
    content = {"layers": ["layer*8"], "parts": {"layer": layer, "loss": {"forward_ms": 9}}}
    file.write_text(json.dumps(content))
    job = [*JOB, *PIPELINE, "--zero-bubble-schedule", "zb-h1", "--pipeline-model-parallel-layout", "Ettt|tt|tt|tL"]
    costs = PassCosts((9.0, 6.0, 6.0, 12.0), (6.0, 4.0, 4.0, 2.0), (3.0, 2.0, 2.0, 1.0))
    expected = simulate(build("zb-h1", num_ranks=4, num_microbatches=16), costs).makespan_ms
    assert f", {expected:,.1f} ms" in run(capsys, [*FOUR, "--costs", str(file)], job)
    file.write_text(json.dumps(content | {"layers": ["layer*9"]}))
    assert "is of 9 layers, and the job has 8; record the costs of this job" in refusal(
        capsys, [*FOUR, "--costs", str(file)], job
    )


def against_stock(out: str) -> str:
    """What the report says about Megatron's own schedule."""
    (line,) = [line for line in out.splitlines() if line.startswith("Without the zero-bubble flags")]
    return line


@pytest.mark.parametrize("megatron_lm", [[], ["--megatron-lm"]])
@pytest.mark.parametrize(("virtual", "stock"), [([], "1f1b"), (["2"], "interleaved-1f1b with 2 stages per rank")])
def test_megatrons_own_schedule_is_timed_next_to_ours(
    capsys: Capture, tmp_path: Path, megatron_lm: list[str], virtual: list[str], stock: str
) -> None:
    """As a dry run without our flags prints it, also those of a configuration file."""
    of_stock = ["--num-virtual-stages-per-pipeline-rank", *virtual] if virtual else []
    ours = ["--zero-bubble-schedule", "interleaved-1f1b" if virtual else "zb-h2", "--zero-bubble-exact"]
    job, own = [*JOB, *PIPELINE, *of_stock], [*FOUR, *megatron_lm, "--gpu", "h100"]
    headline = re.search(r"microbatches, ([\d.,]+ ms)", run(capsys, own, job))
    assert headline is not None
    line = against_stock(run(capsys, own, [*job, *ours]))
    assert line.startswith(f"Without the zero-bubble flags, Megatron runs {stock}: {headline[1]}; {ours[1]} takes ")
    assert line.endswith("takes as long.") == bool(virtual)
    if not megatron_lm:
        file = tmp_path / "job.yaml"
        file.write_text(f"zero-bubble-schedule: {ours[1]}\n")
        assert against_stock(run(capsys, own, ["--config", str(file), *job])) == line


def test_job_that_megatrons_own_schedule_cannot_run_says_so(capsys: Capture) -> None:
    line = against_stock(run(capsys, FOUR, [*JOB, *PIPELINE, "--num-layers", "10", "--zero-bubble-schedule", "zb-h1"]))
    assert line.startswith("Without the zero-bubble flags, the job does not run: --num-layers must be divisible by")
    plain = run(capsys, FOUR, [*JOB, *PIPELINE])
    assert "Without the zero-bubble flags" not in plain


def test_post_validation_is_compared_by_its_span(capsys: Capture, tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text('{"forward_ms": 1, "backward_ms": 1, "wgrad_ms": 1}')
    job, own = [*JOB, *PIPELINE, "--zero-bubble-schedule", "zb-h2"], [*FOUR, "--costs", str(costs)]
    stock = "Without the zero-bubble flags, Megatron runs 1f1b: 57.0 ms; zb-h2 takes "
    for more, than in ([], "10.5% less"), (["--zero-bubble-post-validation"], "15.8% less"):  # 51 and 48 ms
        assert against_stock(run(capsys, own, [*job, *more])) == f"{stock}{than} time."
