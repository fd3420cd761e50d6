"""Whole training runs: one process per rank, with RANK, WORLD_SIZE and MASTER_* set as any launcher sets them.

The processes are forked from the fork server of ``ranks.py``, which has done the imports, so that a run starts within
a second. No elastic agent supervises them: the ranks themselves react to the death of another rank.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.helpers.ports import free_port
from tests.helpers.ranks import environment, start_server

Setup = Callable[[int], object]


@dataclass(frozen=True)
class Death:
    """Signal one rank at the start of the ``call``-th call (from 1) of ``target``, given as ``module:Class.method``."""

    rank: int
    target: str
    call: int = 1
    number: signal.Signals = signal.SIGKILL

    def __call__(self, rank: int) -> None:
        if rank != self.rank:
            return
        module, _, path = self.target.partition(":")
        owner_name, _, name = path.rpartition(".")
        owner: Any = importlib.import_module(module)
        if owner_name:
            owner = getattr(owner, owner_name)
        original, calls = getattr(owner, name), 0

        def fatal(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == self.call:
                os.kill(os.getpid(), self.number)
            return original(*args, **kwargs)

        setattr(owner, name, fatal)


@dataclass(frozen=True)
class RankExit:
    """Exit of one rank.

    Attributes:
        exit_code: negative if a signal ended the process.
        output: the process's stdout and stderr.
        ended_s: seconds between the first rank's end and this rank's.
    """

    exit_code: int
    output: str
    ended_s: float


def run_training(
    num_ranks: int,
    flags: Sequence[str],
    folder: Path,
    setup: Setup | None = None,
    timeout: float = 100.0,
    forked: bool = True,
) -> list[RankExit]:
    """Run ``pretrain_gpt.py`` with ``flags`` on ``num_ranks`` processes without an agent; return each rank's exit.

    Args:
        folder: the ranks' output is written here.
        setup: called as ``setup(rank)`` in each process before training, e.g. to inject a fault.
        timeout: seconds for the whole run.
        forked: as for ``RankPool``; False on GPUs.

    Raises:
        TimeoutError: contains the output of every rank; ranks that are still running are killed.
    """
    context = start_server() if forked else get_context("spawn")
    port = free_port()
    logs = [folder / f"rank-{rank}.log" for rank in range(num_ranks)]
    processes = [
        context.Process(target=_rank, args=(rank, num_ranks, port, list(flags), str(log), setup))
        for rank, log in enumerate(logs)
    ]
    with environment():
        for process in processes:
            process.start()
    ended: dict[int, float] = {}
    deadline = time.monotonic() + timeout
    try:
        while len(ended) < num_ranks and time.monotonic() < deadline:
            running = [rank for rank in range(num_ranks) if rank not in ended]
            ready = wait([processes[rank].sentinel for rank in running], timeout=max(0.0, deadline - time.monotonic()))
            ended.update({rank: time.monotonic() for rank in running if processes[rank].sentinel in ready})
    finally:
        for process in processes:
            _kill(process)
    outputs = [log.read_text() if log.exists() else "" for log in logs]
    if len(ended) < num_ranks:
        hanging = sorted(set(range(num_ranks)) - set(ended))
        sections = "\n".join(f"--- rank {rank}:\n{output}" for rank, output in enumerate(outputs))
        raise TimeoutError(f"ranks {hanging} did not end within {timeout:.0f} s\n{sections}")
    first = min(ended.values())
    return [
        RankExit(process.exitcode or 0, output, ended[rank] - first)
        for rank, (process, output) in enumerate(zip(processes, outputs, strict=True))
    ]


def _kill(process: BaseProcess) -> None:
    """Kill a rank and its children: megatron-core's checkpoint writer is a process that outlives a killed rank."""
    assert process.pid is not None, "the process was started"
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _rank(rank: int, num_ranks: int, port: int, flags: list[str], log: str, setup: Setup | None) -> None:
    import torch

    os.setsid()
    _write_to(log)
    torch.set_num_threads(1)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    from pretrain.run import main

    if setup is not None:
        setup(rank)
    sys.exit(main(flags))


@dataclass(frozen=True)
class LaunchedRank:
    """One rank of ``LaunchServer``, with the interface of ``subprocess.Popen``."""

    process: BaseProcess

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self) -> int | None:
        self.process.join()
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()


class LaunchServer:
    """Forks ranks that do the same as ``python -m megatron.zero_bubble.launch SCRIPT ARGUMENTS``, up to its exit.

    For scripts without megatron-core of their own; ``WarmRanks`` is for those of a Megatron-LM checkout.
    """

    def start(self, arguments: Sequence[str], variables: Mapping[str, str], output: Path) -> LaunchedRank:
        """Fork a rank that runs ``arguments``, whose first is the script; its output goes to the file ``output``."""
        rank = start_server().Process(target=_launch, args=(list(arguments), dict(variables), str(output)))
        with environment():
            rank.start()
        return LaunchedRank(rank)


def _launch(arguments: list[str], variables: dict[str, str], output: str) -> None:
    from megatron.zero_bubble.integration.megatron_lm import launch

    os.environ.update(variables)
    _write_to(output)
    sys.path.insert(0, "")  # which the launcher replaces by the script's folder
    try:
        code = launch.main(arguments)
    except SystemExit:
        raise
    except BaseException:  # noqa: BLE001 (as Python ends a process)
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.exit(code)


def _write_to(log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
