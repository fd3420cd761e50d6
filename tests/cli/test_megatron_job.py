"""A dry run of a Megatron-LM job ends with the sentence with which the run ends, for every rule of every table."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.cli import job_figures
from megatron.zero_bubble.integration.megatron_lm import checks, fork_flags
from megatron.zero_bubble.planning.job.flags import parse_ours
from tests.helpers.megatron_lm import BASE_FLAGS, VARIABLE, Checkout, checkouts, environment
from tests.helpers.ranks import RankPool
from tests.helpers.refusals import H1, V, jobs_of_effects, jobs_of_exclusions, jobs_of_options
from tests.helpers.refused_jobs import num_ranks

CHECKOUTS = checkouts()
STAND_IN = Path(__file__).resolve().parents[1] / "helpers" / "stand_in"
SHAPES = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
    "--pipeline-model-parallel-size 2 --train-iters 10"
).split()
BATCH = ["--global-batch-size", "6"]
ENGINE = "transformer_engine"
LOOPED = "--zero-bubble-schedule interleaved-1f1b"
EXPERTS = "--num-experts 4 --moe-token-dispatcher-type alltoall"
PAIRED = f"--zero-bubble-schedule dualpipe-v --zero-bubble-overlap-experts {EXPERTS}"
BULK = f"{H1} --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap --transformer-impl {ENGINE}"
FUSED = "--zero-bubble-schedule seq-zb-h1 --bf16 --transformer-impl local"
OTHERS = (
    f"{H1} --hybrid-layer-pattern M||",
    f"{H1} --hybrid-layer-pattern M|||",
    f"{H1} --hybrid-layer-pattern M-Mt",
    f"{V} --hybrid-layer-pattern M-M* --num-virtual-stages-per-pipeline-rank 2",
    f"{V} --hybrid-layer-pattern M|M",
    f"{V} --hybrid-layer-pattern MM --decoder-first-pipeline-num-layers 2",
    f"{H1} --yaml-cfg x.yaml",
    f"{H1} --num-layers 6 --tensor-parallel-num-weight-shards 2",
    f"{V} --save x --save-interval 5 --ckpt-format torch",
    f"{V} --decoder-first-pipeline-num-layers 1",
    f"{LOOPED} --decoder-last-pipeline-num-layers 3",
    f"{LOOPED} --num-layers-per-virtual-pipeline-stage 1 --decoder-last-pipeline-num-layers 2",
    f"{LOOPED} --num-layers-per-virtual-pipeline-stage 3",
    f"{H1} --pipeline-model-parallel-layout tt|tt",
    f"{H1} --pipeline-model-parallel-layout Ett|ttx",
    f"{H1} --pipeline-model-parallel-layout Ett|tttL",
    f"{H1} --pipeline-model-parallel-layout Ett|ttL --mtp-num-layers 1",
    f"{H1} --pipeline-model-parallel-layout Ett|ttmL",
    f"{H1} --pipeline-model-parallel-layout Ett|t|tL",
    f"{V} --pipeline-model-parallel-layout Ett|ttL",
    f"{LOOPED} --microbatch-group-size-per-virtual-pipeline-stage 3 --num-virtual-stages-per-pipeline-rank 2",
    f"{LOOPED} --no-overlap-p2p-communication",
    f"{H1} --fp8-format hybrid --zero-bubble-post-validation",
    "--zero-bubble-schedule seq-zb-h1 --multi-latent-attention --position-embedding-type rope",
    f"{H1} --step-batch-size-schedule 1:4",
    f"{V} --fine-grained-activation-offloading",
    f"{H1} --micro-batch-size 4",
    f"{H1} --rampup-batch-size 2 1 100 --micro-batch-size 2",
    f"{H1} --perform-rl-step --rl-training-cuda-graphs --cuda-graph-impl full_iteration",
    f"{H1} --zero-bubble-record-costs x --zero-bubble-schedule 1f1b",
    "--zero-bubble-schedule zb-9",
    "--zero-bubble-schedule-file nowhere.json",
    f"{H1} --zero-bubble-schedule-file x",
    f"{H1} --zero-bubble-exat",
    f"{H1} --zero-bubble-post-receives never",
    f"{H1} --zero-bubble-trace x --zero-bubble-trace-iterations 1-x",
    f"{H1} --optimizer dist_muon --zero-bubble-post-validation",
    f"{H1} --optimizer sgd --zero-bubble-post-validation --zero-bubble-rollback inverse",
    FUSED,
    f"{PAIRED} --expert-model-parallel-size 2 --moe-token-dispatcher-type allgather",
    f"{PAIRED} --expert-model-parallel-size 2 --moe-shared-expert-overlap",
    f"{PAIRED} --expert-model-parallel-size 2 --recompute-granularity full",
    f"{PAIRED} --expert-model-parallel-size 2 --mtp-num-layers 2",
    f"{PAIRED} --expert-model-parallel-size 2",
    f"{PAIRED} --bf16",
)
"""Jobs that rules outside the tables refuse."""
UNKNOWN_FLAG = "Megatron: job.py: error: unrecognized arguments: "
NEED_NO_CASE = (
    "Megatron-LM needs stages 0 to",
    "zero-bubble schedules need --num-layers, got none",
    "zero-bubble schedules need a model with one stack of layers",
)
"""Begin of sentences for which there is no schedule by name, that another rule precedes in a dry run, or that need
another script."""


def of_tables() -> list[str]:
    """One job per rule of the tables."""
    rows = (*jobs_of_options(), *jobs_of_effects(under_launcher=True), *jobs_of_exclusions(under_launcher=True))
    return list(dict.fromkeys(words for _, words in rows))


def of_the_fork() -> list[str]:
    """One job per flag of the authors' fork that has no equivalent."""
    jobs = [f"{flag} 1" for flag in fork_flags._REFUSED] + list(fork_flags._REFUSED_SWITCHES)
    return [*jobs, f"--enable-zero-bubble {H1}", "--enable-zero-bubble --zero-bubble-max-pending-backward x"]


ALL = [*of_tables(), *of_the_fork(), *OTHERS]


def sentences_of_runs(rank: int, jobs: Sequence[Sequence[str]]) -> list[str]:
    """How runs of a stand-in for Megatron-LM's script end, in the order of the launcher's steps."""
    from megatron.zero_bubble.core.errors import UserError
    from megatron.zero_bubble.integration.megatron_lm import install
    from megatron.zero_bubble.integration.megatron_lm.meeting import Meeting
    from megatron.zero_bubble.integration.patching.seams import installed_seams
    from megatron.zero_bubble.planning.job.effects import Job
    from megatron.zero_bubble.planning.job.rules import check_job

    sys.path.insert(0, str(STAND_IN))
    try:
        training = importlib.import_module("megatron.training.arguments")
    finally:
        sys.path.remove(str(STAND_IN))
        for name in [name for name in sys.modules if name.startswith("megatron.training")]:
            del sys.modules[name]
    add_arguments = install._with_our_flags(training.add_megatron_arguments)
    said = []
    for job in jobs:
        try:
            arguments, _ = fork_flags.modernize(job)
            run, _ = parse_ours(arguments)
            checks.check_format(run, "x" if "--yaml-cfg" in arguments else None)
            check_job(Job(run, under_launcher=True))
            args = add_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(arguments)
            validate = install._validated(training.validate_args, run, installed_seams(), print, Meeting())
            validate(args)
        except UserError as error:
            said.append(str(error))
    return said


@pytest.fixture(scope="module")
def of_runs(ranks: RankPool) -> dict[str, str]:
    """The sentence of every job's run."""
    jobs = [["--pipeline-model-parallel-size", "2", *job.split()] for job in ALL]
    return dict(zip(ALL, ranks.run(1, sentences_of_runs, jobs)[0], strict=True))


def dry_run(capsys: pytest.CaptureFixture[str], job: str, *more: str) -> str:
    """The sentence of a job's dry run, or its report."""
    own = ["--gpus-per-node", str(num_ranks(job.split())), *more]
    shapes = SHAPES if "step-batch" in job else [*SHAPES, *BATCH]
    code = main(["dry-run", *own, "--megatron-lm", "--", *shapes, *job.split()])
    out, err = capsys.readouterr()
    assert (code, bool(out), bool(err)) in ((0, True, False), (2, False, True))
    return out or err.removeprefix("zero-bubble dry-run: ").removesuffix("\n")


@pytest.mark.parametrize("job", ALL)
def test_dry_run_ends_like_the_run(capsys: pytest.CaptureFixture[str], of_runs: dict[str, str], job: str) -> None:
    assert dry_run(capsys, job) == of_runs[job]


@pytest.mark.skipif(not CHECKOUTS, reason=f"{VARIABLE} names no checkout of Megatron-LM")
@pytest.mark.timeout(500)
@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
def test_dry_run_ends_like_the_run_of_a_checkout(capsys: pytest.CaptureFixture[str], checkout: Checkout) -> None:
    """With Megatron's own parser and validation, as far as the version knows the flag."""
    base = BASE_FLAGS.replace("--global-batch-size 6", "").split()
    base += ["--pipeline-model-parallel-size", "2", "--zero-bubble-device", "cpu"]
    all_but_fused = [job for job in ALL if job != FUSED]  # the kernel needs a GPU
    jobs = [[*base, *([] if "step-batch" in job else BATCH), *job.split()] for job in all_but_fused]
    script = [sys.executable, str(STAND_IN.parent / "refused_jobs.py"), str(checkout.path)]
    done = subprocess.run(script, input=json.dumps(jobs), capture_output=True, text=True, env=environment(), check=True)
    said = dict(zip(all_but_fused, json.loads(done.stdout), strict=True))
    unknown = [job for job in all_but_fused if said[job].startswith(UNKNOWN_FLAG)]
    assert len(unknown) < len(ALL) / 3
    for job in all_but_fused:
        assert job in unknown or dry_run(capsys, job) == said[job]


def test_every_sentence_of_the_launchers_checks_has_a_job(of_runs: dict[str, str]) -> None:
    said = " ".join(of_runs.values())
    for node in ast.walk(ast.parse(inspect.getsource(checks))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "UserError":
            texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
            begin = next(text.strip() for text in texts if isinstance(text, str) and len(text) > 20)
            assert begin in said or begin.startswith(NEED_NO_CASE), begin


def test_steps_of_the_batch_size_are_proved(capsys: pytest.CaptureFixture[str]) -> None:
    steps = ["--step-batch-size-schedule", "0:4 1M:16 2M:32"]
    job = ["dry-run", "--gpus-per-node", "4", "--megatron-lm", "--", *SHAPES, *H1.split(), *steps]
    assert main(job) == 0
    out = capsys.readouterr().out
    assert "zb-h1: 2 ranks, 16 microbatches" in out and "Proved free of deadlock for 2 to 16 microbatches" in out


def test_a_long_ramp_is_proved_in_part(capsys: pytest.CaptureFixture[str]) -> None:
    """A run proves every batch size before it trains; to prove all 97 here took half a minute on 16 ranks."""
    ramp = ["--rampup-batch-size", "8", "2", "1000", "--global-batch-size", "200"]
    assert main(["dry-run", "--gpus-per-node", "2", "--megatron-lm", "--", *SHAPES, *H1.split(), *ramp]) == 0
    out = capsys.readouterr().out
    assert "Proved free of deadlock for 8 to 200 microbatches" in out
    assert ": 8 of 97 batch sizes, evenly spread; the run proves all before it trains." in out


def test_overlaps_that_deferred_gradients_cannot_have_are_switched_off(capsys: pytest.CaptureFixture[str]) -> None:
    out = dry_run(capsys, f"{BULK} --global-batch-size 6 --disable-tp-comm-overlap-ag")
    assert "tp_comm_bulk_wgrad and tp_comm_bulk_dgrad are switched off, because W must not find its operands" in out


def test_what_the_schedule_does_itself_is_switched_off(capsys: pytest.CaptureFixture[str]) -> None:
    out = dry_run(capsys, f"{H1} --delay-wgrad-compute --overlap-p2p-communication-warmup-flush --global-batch-size 6")
    assert "--delay-wgrad-compute is switched off: the schedule delays all weight gradients itself, to W." in out
    assert "--overlap-p2p-communication-warmup-flush is switched off: the schedule overlaps messages with passes" in out


@pytest.mark.parametrize("schedule", ["", H1])
def test_sequence_parallelism_of_one_rank_is_off(capsys: pytest.CaptureFixture[str], schedule: str) -> None:
    """Megatron warns and goes on."""
    out = dry_run(capsys, f"{schedule} --sequence-parallel --global-batch-size 6")
    assert "--sequence-parallel has no effect with --tensor-model-parallel-size 1, as in Megatron-LM." in out


@pytest.mark.parametrize(
    ("num_microbatches", "group", "sentence"),
    [
        (5, "--microbatch-group-size-per-virtual-pipeline-stage 5", None),
        (7, "--microbatch-group-size-per-virtual-pipeline-stage 5", None),
        (6, "--microbatch-group-size-per-virtual-pipeline-stage 5", "got 6 microbatches in groups of 5 on 2 ranks"),
        (5, "--microbatch-group-size-per-virtual-pipeline-stage 6", "got 5 microbatches in groups of 6 on 2 ranks"),
        (5, "--microbatch-group-size-per-virtual-pipeline-stage 1", "got 5 microbatches in groups of 1 on 2 ranks"),
        (5, "", "divisible by the number of pipeline ranks, got 5 and 2"),
    ],
)
def test_groups_of_microbatches_are_those_that_megatron_runs(
    capsys: pytest.CaptureFixture[str], num_microbatches: int, group: str, sentence: str | None
) -> None:
    chunks = f"--num-virtual-stages-per-pipeline-rank 2 {group} --eval-iters 0"
    out = dry_run(capsys, f"{chunks} --global-batch-size {num_microbatches}")
    assert (sentence or "The job uses Megatron's built-in schedule") in out


def test_job_without_a_batch_size_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    for schedule in ([], H1.split()):
        assert main(["dry-run", "--gpus-per-node", "2", "--megatron-lm", "--", *SHAPES, *schedule]) == 2
        assert "a job needs --global-batch-size, or --step-batch-size-schedule" in capsys.readouterr().err


def test_last_iteration_of_a_job_by_samples(capsys: pytest.CaptureFixture[str]) -> None:
    job = f"{H1} --zero-bubble-trace x --zero-bubble-trace-iterations 11-12"
    samples = ["--train-samples", "65"]
    shapes = [word for word in SHAPES if word not in ("--train-iters", "10")]
    flags = ["dry-run", "--gpus-per-node", "2", "--megatron-lm", "--", *shapes, *BATCH, *job.split(), *samples]
    assert main(flags) == 2
    assert "iterations of the run, which begins with 1 and ends with 10" in capsys.readouterr().err
    assert main([*flags[:-1], "66"]) == 0
    assert "Not checked here" not in capsys.readouterr().out


def test_flags_of_the_fork_are_replaced_as_in_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    out = dry_run(capsys, "--enable-zero-bubble --zero-bubble-max-pending-backward 4 --allow-padding-num-layers")
    assert "zb-auto: 2 ranks" in out
    assert "is replaced by --zero-bubble-schedule zb-auto --zero-bubble-memory-limit 2p.\n" in out
    assert "--allow-padding-num-layers is no longer needed: " in out and "Not checked here" not in out


def test_layers_per_stage_need_equal_ranks_without_a_schedule_too(capsys: pytest.CaptureFixture[str]) -> None:
    uneven = "--num-layers-per-virtual-pipeline-stage 1 --decoder-last-pipeline-num-layers 2"
    assert "got --decoder-last-pipeline-num-layers 2; give --num-virtual-stages-per" in dry_run(capsys, uneven)
    ends = "--num-virtual-stages-per-pipeline-rank 2 --decoder-last-pipeline-num-layers 3"
    assert dry_run(capsys, ends).startswith("--decoder-last-pipeline-num-layers must be divisible by the number of st")


def test_layout_of_a_hybrid_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert "has the invalid letter 't' in 'M*t'" in dry_run(capsys, "--hybrid-layer-pattern M*t")
    looped = dry_run(capsys, "--hybrid-layer-pattern M-|M*|ME-|M-")
    assert "0: embedding+M-, 2: ME-" in looped and "1: M*, 3: M-+loss" in looped
    assert "Experts are not estimated" in looped


def test_layers_with_experts_are_those_of_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    experts = "--hidden-size 4096 --seq-length 2048 --num-experts 8 --moe-router-topk 2 --moe-layer-freq"
    listed = dry_run(capsys, f"{experts} ([0]*1+[1]*3)")
    assert listed == dry_run(capsys, f"{experts} [0,1]+[1]*2") and "Experts are assumed to be balanced" in listed
    assert listed != dry_run(capsys, f"{experts} 1") and listed != dry_run(capsys, f"{experts} 2")
    assert "--moe-layer-freq must have one entry per layer, got 2 entries and 4 layers" in dry_run(
        capsys, f"{experts} [0,1]"
    )
    assert "argument --moe-layer-freq: it must be a number, or lists of 0 and 1" in dry_run(
        capsys, f"{experts} open(1)"
    )


def test_hybrid_model_is_estimated_and_cut_by_work(capsys: pytest.CaptureFixture[str]) -> None:
    shapes = "--hidden-size 1024 --seq-length 1024 --vocab-size 64000 --mamba-num-heads"
    v = dry_run(capsys, f"{V} --hybrid-layer-pattern M-M*M-M-M*M- {shapes} 32")
    assert "Times and memory are estimated from the model's shapes" in v and "+loss" in v
    assert "weights, optimizer" in v and "--mamba-num-heads" not in v
    wider = dry_run(capsys, f"{V} --hybrid-layer-pattern M-M*M-M-M*M- {shapes} 128")
    length, longer = (float(re.search(r"microbatches, ([\d.,]+) ms", text)[1]) for text in (v, wider))  # type: ignore[index]
    assert longer > 1.2 * length


def test_multi_token_prediction_has_costs(capsys: pytest.CaptureFixture[str]) -> None:
    """Its layer and the output layer, which runs twice, make the last rank the busiest."""
    large = "--zero-bubble-schedule zb-h1 --hidden-size 1024 --seq-length 1024 --num-layers 8"
    plain = dry_run(capsys, f"{large} --pipeline-model-parallel-layout Et*4|t*4L")
    layout = dry_run(capsys, f"{large} --pipeline-model-parallel-layout Et*4|t*4mL --mtp-num-layers 1")
    flag = dry_run(capsys, f"{large} --mtp-num-layers 1")
    assert "1: 4+mtp+loss" in layout and "1: 4+mtp+loss" in flag and "1: 4+loss" in plain
    length, longer = (float(re.search(r"microbatches, ([\d.,]+) ms", text)[1]) for text in (plain, flag))  # type: ignore[index]
    assert longer > 1.2 * length
    assert layout.split("Not checked")[0] == flag.split("Not checked")[0]
    apart = dry_run(capsys, f"{large} --pipeline-model-parallel-layout Et*8mm|L --mtp-num-layers 2")
    assert "0: embedding+8+2 mtp" in apart and "1: 0+loss" in apart


def test_slices_of_models_like_deepseek_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    latent = "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8"
    router = "--num-experts 4 --moe-router-load-balancing-type seq_aux_loss --mtp-num-layers 1"
    planned = dry_run(capsys, f"--zero-bubble-schedule seq-zb-h1 --zero-bubble-slices 4 {latent} {router}")
    assert "+mtp+loss" in planned and "slices" in planned


def test_predictions_before_the_last_stage_widen_what_is_handed_on() -> None:
    assert job_figures._widths((0, 2, 0)) == (1.0, 3.0, 3.0)
    assert job_figures._widths((0, 0, 2)) == () == job_figures._widths((0,)), "the last stage hands nothing on"


def test_costs_per_layer_without_multi_token_prediction_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text('{"layers": ["a*8"], "parts": {"a": {"forward_ms": 1, "backward_ms": 1, "wgrad_ms": 1}}}')
    job = "--zero-bubble-schedule zb-h1 --num-layers 8"
    predicts = dry_run(capsys, f"{job} --mtp-num-layers 1", "--costs", str(costs))
    assert "no part for multi-token prediction" in " ".join(predicts.split())
    assert "no part for multi-token prediction" not in " ".join(dry_run(capsys, job, "--costs", str(costs)).split())
