"""Tests of the launcher: unchanged scripts without our flags, and one sentence per error."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.zero_bubble import PassCosts, build, simulate
from megatron.zero_bubble.core.formats.layout import LAYOUT
from megatron.zero_bubble.core.formats.plan import plan_to_json
from megatron.zero_bubble.integration.megatron_lm.launch import main
from tests.helpers.launch import LaunchServer
from tests.helpers.megatron_lm import Job

STAND_IN = Path(__file__).resolve().parents[2] / "helpers" / "stand_in"
PIPELINE = ("--pipeline-model-parallel-size", "2", "--zero-bubble-device", "cpu")
FSDP = (
    "zero-bubble schedules need use_megatron_fsdp=False, because FSDP does not reduce gradients through "
    "DistributedDataParallel; got True; drop --use-megatron-fsdp"
)
pytestmark = pytest.mark.timeout(200)


def launch(*flags: str, script: Path = STAND_IN / "job.py", forked: bool = True) -> tuple[list[str], int]:
    """Run one rank; ``forked`` with the imports done, or started as a user does."""
    log = Job(script, 1, flags).run(timeout=120, warm=LaunchServer() if forked else None)
    return log.text.splitlines(), log.exit_codes[0]


def test_script_is_unchanged_without_our_flags(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "print(__name__, sys.argv, sys.path[0], sorted(n for n in sys.modules if n.startswith('megatron.core')))\n"
        "sys.exit(7)\n"
    )
    flags = ("--lr", "1", "--distributed-backend", "nccl", "-v")
    plain = subprocess.run([sys.executable, str(script), *flags], capture_output=True, text=True, check=False)
    lines, code = launch(*flags, script=script, forked=False)
    assert lines == [
        "zero-bubble: no --zero-bubble-schedule; the script runs unchanged",
        *plain.stdout.splitlines(),
    ]
    assert code == plain.returncode == 7


def test_our_flags_are_in_the_jobs_arguments() -> None:
    lines, code = launch(*PIPELINE, "--zero-bubble-schedule", "zb-h1", "--zero-bubble-exact")
    assert code == 0, lines
    device, *taken = [line for line in lines if line.startswith("zero-bubble: ")]
    assert device == "zero-bubble: running on CPU ranks over gloo"
    assert len(taken) == 1
    assert taken[0].startswith("zero-bubble: schedule zb-h1 in megatron-core 0.")
    assert "training.arguments.add_megatron_arguments, training.initialize.validate_args, core.pipeline" in taken[0]
    assert "zero_bubble_schedule = zb-h1" in lines
    assert "zero_bubble_exact = True" in lines


def test_schedule_file_is_read_once(tmp_path: Path) -> None:
    """By the launcher, before the script begins, which deletes it here."""
    file, script = tmp_path / "plan.json", tmp_path / "stand_in" / "job.py"
    schedule = build("zb-v", num_ranks=2, num_microbatches=6)
    file.write_text(plan_to_json(simulate(schedule, PassCosts.uniform(schedule.placement, 1.0, 1.0, 1.0))))
    shutil.copytree(STAND_IN, script.parent)
    script.write_text(f"import os\nos.remove({str(file)!r})\n{script.read_text()}")
    lines, code = launch(*PIPELINE, "--zero-bubble-schedule-file", str(file), script=script)
    assert code == 0, lines
    assert any(line.startswith(f"zero-bubble: schedule {file} in megatron-core") for line in lines), lines


def test_job_gets_the_layout_of_its_plan(tmp_path: Path) -> None:
    """Before Megatron validates its flags, which then derive the stages per rank from it."""
    file = tmp_path / "plan.json"
    schedule = build("zb-v", num_ranks=2, num_microbatches=6)
    timeline = simulate(schedule, PassCosts.uniform(schedule.placement, 1.0, 1.0, 1.0))
    file.write_text(plan_to_json(timeline, more={LAYOUT: "Et|tt|t|L"}))
    lines, code = launch(*PIPELINE, "--zero-bubble-schedule", str(file))
    assert code == 0, lines
    assert "zero-bubble: layers by stage: Et|tt|t|L" in lines
    assert "pipeline_model_parallel_layout = Et|tt|t|L" in lines


def test_help_of_the_launcher_lists_our_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: python -m megatron.zero_bubble.launch SCRIPT")
    assert "--zero-bubble-schedule NAME" in out and "--zero-bubble-nccl-ctas" not in out
    assert main(["--zero-bubble-help-all"]) == 0
    assert "--zero-bubble-nccl-ctas" in capsys.readouterr().out
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("usage: python -m megatron.zero_bubble.launch SCRIPT")


def test_our_flags_are_in_the_jobs_help() -> None:
    lines, code = launch("--help")
    assert code == 0
    assert "zero bubble:" in lines
    assert any("--zero-bubble-schedule NAME" in line for line in lines)
    assert any("--pipeline-model-parallel-size" in line for line in lines)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--zero-bubble-shedule zb-h1", "unknown flag --zero-bubble-shedule; --zero-bubble-help-all lists all flags"),
        (
            "--yaml-cfg=x.yaml --zero-bubble-schedule zb-h1",
            "--yaml-cfg is not supported with a zero-bubble schedule; give the options as flags instead",
        ),
        ("--use-megatron-fsdp --zero-bubble-schedule zb-h1", FSDP),
        (
            "--zero-bubble-trace x",
            (
                "--zero-bubble-trace x works only with a zero-bubble schedule to measure; got none; leave it out, or "
                "give --zero-bubble-schedule 1f1b, which has the order of stock Megatron"
            ),
        ),
        (
            "--zero-bubble-schedule 1f1b --zero-bubble-record-costs x",
            (
                "--zero-bubble-record-costs needs a schedule that splits every backward into B and W, got 1f1b; give "
                "--zero-bubble-schedule zb-h1"
            ),
        ),
        (
            "--zero-bubble-schedule interleaved-1f1b --microbatch-group-size-per-virtual-pipeline-stage 3",
            (
                "zero-bubble schedules support only a microbatch group size equal to the number of pipeline ranks, got "
                "--microbatch-group-size-per-virtual-pipeline-stage 3 and 2 ranks; drop the flag"
            ),
        ),
    ],
)
def test_invalid_flags_are_rejected_in_one_sentence_per_rank(flags: str, sentence: str) -> None:
    log = Job(STAND_IN / "job.py", 2, (*PIPELINE, *flags.split())).run(timeout=120, warm=LaunchServer())
    ours = [line for line in log.of("zero-bubble: ") if "on CPU ranks" not in line]
    assert ours == [f"zero-bubble: {sentence}", f"zero-bubble: rank 1: {sentence}"]
    assert "Traceback" not in log.text
    assert log.exit_codes == (1, 1)


def test_unused_schedule_is_reported() -> None:
    script = STAND_IN / "idle.py"
    lines, _ = launch(*PIPELINE, "--zero-bubble-schedule", "zb-h1", script=script, forked=False)
    assert [line for line in lines if line == "done" or line.startswith("zero-bubble")] == [
        "zero-bubble: running on CPU ranks over gloo",
        "done",
        f"zero-bubble: {script} did not call Megatron's validate_args, so the schedule was never enabled",
    ]


def test_script_without_megatron_training_is_rejected(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('done')\n")
    lines, code = launch(*PIPELINE, "--zero-bubble-schedule", "zb-h1", script=script)
    assert [line for line in lines if line == "done" or line.startswith("zero-bubble")][1:] == [
        (
            "zero-bubble: cannot import megatron.training, whose get_model zero-bubble training replaces; run a script "
            "from a Megatron-LM checkout, or call apply() in your own training loop"
        )
    ]
    assert code == 1


def test_missing_script_is_rejected() -> None:
    lines, code = launch(script=Path("nowhere.py"))
    assert lines == ["zero-bubble: the first argument must be the script to run, got 'nowhere.py', which is not a file"]
    assert code == 2
