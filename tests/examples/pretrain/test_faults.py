"""Tests of runs with failing ranks: survivors end in time and name the failed rank."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from tests.helpers.launch import Death, RankExit, run_training
from tests.helpers.parity import BASE_FLAGS, Layout
from tests.helpers.ports import free_port
from tests.helpers.ranks import REPOSITORY, RankPool
from tests.helpers.rows import some

pytestmark = pytest.mark.timeout(300)  # whole runs, some including imports; ten times the duration on an idle machine

# Documented limit within which all survivors of a killed rank end. On an idle machine they take a few seconds, on a
# machine with oversubscribed cores more than 20.
LIMIT_S = 60.0

BACKWARD = "megatron.zero_bubble.integration.adapter.stage:MegatronStage._backward"
OPTIMIZER = "megatron.core.optimizer.optimizer:ChainedOptimizer.step"
VALIDATE = "megatron.zero_bubble.engine.optimizer.post_validation:PostValidatedOptimizer.validate"
SAVE = "megatron.core.dist_checkpointing:save"
SENTENCE = (
    "zero-bubble: rank {0}: stopped because rank {1} died; look at the output of rank {1} first, then start the job "
    "again from its last checkpoint"
)


def flags(layout: Layout, num_microbatches: int, *more: str, schedule: str = "zb-h1") -> list[str]:
    words = f"{BASE_FLAGS} {layout.flags(num_microbatches)} --zero-bubble-schedule {schedule}".split()
    return [*words, "--log-interval", "1", *more]


def exit_in_backward(rank: int) -> None:
    if rank == 1:
        from megatron.zero_bubble.integration.adapter.stage import MegatronStage

        MegatronStage._backward = lambda *_, **__: sys.exit(3)  # type: ignore[method-assign, assignment]


def check_survivors(ended: list[RankExit], victim: int) -> None:
    assert ended[victim].exit_code == -signal.SIGKILL
    for rank, survivor in enumerate(ended):
        if rank == victim:
            continue
        assert survivor.exit_code == 1, survivor.output
        assert survivor.ended_s < LIMIT_S
        sentences = re.findall("^.* (?:stopped because|has failed or hangs).*$", survivor.output, re.MULTILINE)
        assert sentences == [SENTENCE.format(rank, victim)], survivor.output
        assert "Traceback" not in survivor.output


class TestKilledRank:
    @pytest.mark.parametrize("victim", some([0, 2], 0))
    def test_death_in_the_passes(self, tmp_path: Path, victim: int) -> None:
        """Every other rank waits for its neighbour, which for most ranks is not the dead rank."""
        ended = run_training(4, flags(Layout(4), 8), tmp_path, Death(victim, BACKWARD, call=20))
        check_survivors(ended, victim)

    def test_death_in_the_optimizer(self, tmp_path: Path) -> None:
        """The other ranks wait in the reduction of the gradient norm, which involves no pass and no channel."""
        ended = run_training(2, flags(Layout(2), 2), tmp_path, Death(1, OPTIMIZER, call=2))
        check_survivors(ended, 1)

    def test_death_in_another_pipeline(self, tmp_path: Path) -> None:
        """The intact pipeline ends as well, and so do ranks whose neighbour is a survivor that ended before."""
        ended = run_training(4, flags(Layout(2, data=2), 4), tmp_path, Death(3, BACKWARD, call=6))
        check_survivors(ended, 3)

    def test_sys_exit_is_named_by_the_others(self, tmp_path: Path) -> None:
        """Python does not call ``sys.excepthook`` for SystemExit."""
        ended = run_training(2, flags(Layout(2), 4), tmp_path, exit_in_backward)
        assert [rank.exit_code for rank in ended] == [1, 3]
        assert SENTENCE.replace("died", "exited with code 3").format(0, 1) in ended[0].output

    def test_death_before_the_process_groups_exist(self, tmp_path: Path) -> None:
        """Rank 1 dies at the start of ``lay_out``, which creates the process groups."""
        lay_out = "pretrain.distributed:lay_out"
        check_survivors(run_training(4, flags(Layout(4), 2), tmp_path, Death(1, lay_out)), 1)


def test_kill_between_step_and_validation_keeps_a_valid_checkpoint(tmp_path: Path) -> None:
    """Saved states are final: the resumed run equals the uninterrupted run bit for bit."""

    def metrics_of(name: str, *more: str, death: Death | None = None) -> tuple[list[RankExit], list[str]]:
        file = tmp_path / f"{name}.jsonl"
        words = flags(Layout(2), 4, "--zero-bubble-post-validation", "--clip-grad", "100", schedule="zb-h2")
        every = ["--train-iters", "7", "--eval-iters", "0", "--metrics-file", str(file), *more]
        (tmp_path / name).mkdir()
        ended = run_training(2, [*words, *every], tmp_path / name, death)
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        return ended, [f"{line['iteration']} {line['lm_loss']!r} {line['grad_norm']!r}" for line in lines]

    saving = ("--save", str(tmp_path / "saved"), "--save-interval", "4")
    _, whole = metrics_of("whole")
    ended, cut = metrics_of("cut", *saving, death=Death(1, VALIDATE, call=3))
    check_survivors(ended, 1)
    _, resumed = metrics_of("resumed", "--load", str(tmp_path / "saved"))
    assert len(whole) == 7 and cut == whole[: len(cut)] and len(cut) >= 4
    assert resumed == whole[4:]


def real_script(*arguments: str, environment: dict[str, str] | None = None, log: Path) -> subprocess.Popen[bytes]:
    """Start a new Python process as a user would, including imports and exit."""
    inherited = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=REPOSITORY,
            env={**inherited, **(environment or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def wait_for(happened: Callable[[], bool], what: str, timeout: float = 200.0) -> None:
    deadline = time.monotonic() + timeout
    while not happened():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout} s"
        time.sleep(0.02)


def iterations_in(metrics: Path) -> int:
    return metrics.read_text().count('"train"') if metrics.exists() else 0


def long_run(num_ranks: int, metrics: Path) -> list[str]:
    """Return flags for iterations that consist almost entirely of passes."""
    return flags(Layout(num_ranks), 24, "--train-iters", "1000", "--eval-iters", "0", "--metrics-file", str(metrics))


@pytest.mark.full  # TestKilledRank has the same ends, in forked processes
def test_killed_rank_without_an_agent(tmp_path: Path) -> None:
    """Without an agent, the survivors' processes end by themselves."""
    metrics, port = tmp_path / "metrics", free_port()
    logs = [tmp_path / f"{rank}.log" for rank in range(4)]
    ranks = [
        real_script(
            "scripts/pretrain_gpt.py",
            *long_run(4, metrics),
            environment={
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "4",
                "LOCAL_WORLD_SIZE": "4",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            log=log,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        wait_for(lambda: iterations_in(metrics) >= 2, "the second iteration")
        ranks[1].kill()
        killed = time.monotonic()
        for process in ranks:
            process.wait(timeout=LIMIT_S)
        ended = [
            RankExit(process.returncode, log.read_text(), time.monotonic() - killed)
            for process, log in zip(ranks, logs, strict=True)
        ]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    check_survivors(ended, 1)


@pytest.mark.full
def test_killed_rank_under_torchrun(tmp_path: Path) -> None:
    """The agent's SIGTERM, normally a request for a clean stop, must not suppress survivors' messages or hang them."""
    metrics, log = tmp_path / "metrics", tmp_path / "log"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    agent = real_script(*launcher, "scripts/pretrain_gpt.py", *long_run(2, metrics), log=log)
    try:
        wait_for(lambda: iterations_in(metrics) >= 2, "the second iteration")
        children = {int(child.environ()["RANK"]): child for child in psutil.Process(agent.pid).children()}
        children[1].kill()
        assert agent.wait(timeout=LIMIT_S) != 0
    finally:
        for process in (*psutil.Process(agent.pid).children(), agent) if agent.poll() is None else ():
            process.kill()
        agent.wait()
    output = log.read_text()
    assert output.count(SENTENCE.format(0, 1)) == 1, output


def stop_after_a_failure(rank: int) -> bool:
    from pretrain.stop import StopRequest

    before, everyone = signal.getsignal(signal.SIGTERM), dist.group.WORLD
    assert everyone is not None
    try:
        with pytest.raises(ZeroDivisionError), StopRequest(everyone, "rank 0"):
            _ = 1 / 0
        os.kill(os.getpid(), signal.SIGTERM)
        return signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sigterm_is_ignored_after_a_failure(ranks: RankPool) -> None:
    assert ranks.run(1, stop_after_a_failure) == [True]


class TestCheckpoint:
    def test_checkpoint_survives_a_kill_during_the_next_save(self, tmp_path: Path) -> None:
        """Rank 1 dies while writing the second checkpoint; resuming from the first equals the whole run bit for bit."""
        layout, folder = Layout(2), tmp_path / "checkpoints"
        keep = ["--save", str(folder), "--load", str(folder), "--save-interval", "2", "--attention-dropout", "0.1"]
        metrics = {name: tmp_path / f"{name}.jsonl" for name in ("whole", "cut", "resumed")}

        def run(name: str, *more: str, setup: Death | None = None) -> list[RankExit]:
            words = flags(layout, 3, *more, "--attention-dropout", "0.1", "--metrics-file", str(metrics[name]))
            words += ["--eval-iters", "0", "--train-iters", "4"]
            return run_training(layout.num_ranks, words, tmp_path, setup)

        assert [rank.exit_code for rank in run("whole")] == [0, 0]
        ended = run("cut", *keep, setup=Death(1, SAVE, call=2))
        check_survivors(ended, 1)
        assert (folder / "iter_0000004.writing").is_dir()
        assert (folder / "latest_checkpointed_iteration.txt").read_text() == "2"
        assert [rank.exit_code for rank in run("resumed", *keep)] == [0, 0]
        assert bits(metrics["cut"]) == bits(metrics["whole"])[:4]
        assert bits(metrics["resumed"]) == bits(metrics["whole"])[2:]


def bits(metrics: Path) -> list[tuple[int, str, str]]:
    """Return iteration, exact loss and exact gradient norm of every training record."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [(m["iteration"], m["lm_loss"].hex(), m["grad_norm"].hex()) for m in lines if m["kind"] == "train"]
