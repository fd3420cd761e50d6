"""Tests of lost ranks in Megatron-LM jobs: within a minute every other rank names the lost one and ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.helpers.megatron_lm import VARIABLE, Checkout, Job, RunningJob, checkouts, environment, gpt_job, running_gpt

CHECKOUTS = checkouts()
NEWEST = CHECKOUTS[-1:]
ALL = [*NEWEST, *(pytest.param(checkout, marks=pytest.mark.full, id=str(checkout)) for checkout in CHECKOUTS[:-1])]
pytestmark = [
    pytest.mark.skipif(not CHECKOUTS, reason=f"{VARIABLE} names no checkout of Megatron-LM"),
    pytest.mark.timeout(600),
]
# The limit stated in the README.
LIMIT_S = 60.0
FLAGS = "--pipeline-model-parallel-size 2 --global-batch-size 8 --train-iters 5000"
SENTENCE = (
    "zero-bubble: rank {0}: stopped because rank {1} {2}; look at the output of rank {1} first, then start the job "
    "again from its last checkpoint"
)
# Per moment of the failure: the printed text that marks it, and flags.
TIMES = {
    "in the passes": ("iteration        3/", ""),
    "in an evaluation": ("iteration        3/", "--eval-interval 3 --eval-iters 5000"),
    "in a checkpoint": (
        "saving checkpoint at iteration       3",
        "--save {0} --save-interval 3 --ckpt-format torch_dist",
    ),
}

BREAKS = "breaking on purpose"
BREAKING = """
import os, runpy, sys
from megatron.training import training

train_step, calls = training.train_step, []

def failing(*args, **kwargs):
    calls.append(1)
    if len(calls) == 3 and os.environ["RANK"] in "{lost}":
        print("{says}", flush=True)
        {does}
    return train_step(*args, **kwargs)

training.train_step = failing
runpy.run_path(os.path.join(os.path.dirname(__file__), "pretrain_gpt.py"), run_name="__main__")
"""


def breaking(checkout: Checkout, folder: Path, ranks: str, does: str) -> Job:
    """Return a job in which ``ranks`` (a string of digits) execute the statement ``does`` in the third iteration."""
    for path in (*checkout.path.glob("*.py"), checkout.path / "megatron"):
        (folder / path.name).symlink_to(path)
    script = folder / "breaking.py"
    script.write_text(BREAKING.format(lost=ranks, says=BREAKS, does=does))
    return replace(gpt_job(checkout, 4, FLAGS, "zb-h1"), script=script)


def check_survivors(running: RunningJob, lost: int, how: str = "died") -> None:
    codes = running.wait(LIMIT_S)
    outputs = running.outputs
    for rank in set(range(4)) - {lost}:
        assert codes[rank] == 1, outputs[rank][-4000:]
        sentences = re.findall("zero-bubble: rank .* stopped because .*", outputs[rank])
        assert sentences == [SENTENCE.format(rank, lost, how)], outputs[rank][-4000:]
        assert "Traceback" not in outputs[rank]


@pytest.mark.parametrize("checkout", ALL, ids=str)
@pytest.mark.parametrize("lost", range(4))
@pytest.mark.parametrize("when", TIMES)
def test_killed_rank_is_named_by_all_others(checkout: Checkout, lost: int, when: str, tmp_path: Path) -> None:
    printed, flags = TIMES[when]
    with running_gpt(checkout, 4, f"{FLAGS} {flags.format(tmp_path)}", "zb-h1") as running:
        running.wait_for(printed)
        running.ranks[lost].kill()
        check_survivors(running, lost)


@pytest.mark.parametrize("checkout", NEWEST, ids=str)
@pytest.mark.parametrize("lost", [0, 2])
def test_failed_rank_keeps_its_traceback_and_is_named_by_the_others(
    checkout: Checkout, lost: int, tmp_path: Path
) -> None:
    """The failed rank prints its traceback only; the other ranks name it."""
    job = breaking(checkout, tmp_path, str(lost), 'raise FloatingPointError("on purpose")')
    with job.running() as running:
        running.wait_for(BREAKS)
        check_survivors(running, lost, "ended with FloatingPointError")
    assert "Traceback" in running.outputs[lost] and "FloatingPointError: on purpose" in running.outputs[lost]
    assert "stopped because" not in running.outputs[lost]


@pytest.mark.parametrize("checkout", NEWEST, ids=str)
def test_exited_rank_is_named_with_its_exit_code(checkout: Checkout, tmp_path: Path) -> None:
    with breaking(checkout, tmp_path, "2", "sys.exit(3)").running() as running:
        running.wait_for(BREAKS)
        check_survivors(running, 2, "exited with code 3")
        assert running.ranks[2].poll() == 3


@pytest.mark.parametrize("checkout", NEWEST, ids=str)
def test_ranks_that_exit_together_keep_their_exit_code(checkout: Checkout, tmp_path: Path) -> None:
    """Megatron's rerun state machine ends a job with exit code 16 or 17."""
    with breaking(checkout, tmp_path, "0123", "sys.exit(17)").running() as running:
        assert running.wait(200) == [17] * 4, running.text[-4000:]
    assert "stopped because" not in running.text


@pytest.mark.parametrize("checkout", NEWEST, ids=str)
def test_survivors_print_before_torchrun_ends_them(checkout: Checkout, tmp_path: Path) -> None:
    """The agent sends SIGTERM when it sees a rank die; the other ranks print their sentence before they end."""
    job = gpt_job(checkout, 4, FLAGS, "zb-h1")
    log = tmp_path / "log"
    agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    with log.open("wb") as output:
        torchrun = subprocess.Popen(
            [sys.executable, *agent, *job.before, str(job.script), *job.flags],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(),
        )
    try:
        deadline = time.monotonic() + 300
        while "iteration        3/" not in log.read_text(errors="replace"):
            assert time.monotonic() < deadline and torchrun.poll() is None, log.read_text()[-4000:]
            time.sleep(0.05)
        ranks = {int(child.environ()["RANK"]): child.pid for child in psutil.Process(torchrun.pid).children()}
        os.kill(ranks[1], signal.SIGKILL)
        assert torchrun.wait(LIMIT_S) != 0
    finally:
        for process in (*psutil.Process(torchrun.pid).children(), torchrun) if torchrun.poll() is None else ():
            process.kill()
        torchrun.wait()
    text = log.read_text(errors="replace")
    assert sorted(re.findall("zero-bubble: rank .* stopped because .*", text)) == [
        SENTENCE.format(rank, 1, "died") for rank in (0, 2, 3)
    ], text[-4000:]
