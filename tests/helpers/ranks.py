"""A pool of rank processes, started once and shared by all tests.

Importing torch and megatron-core takes seconds; a collective takes microseconds. A fork server therefore imports them
once, and ranks are forked from it when first needed and kept, so that a test takes only the milliseconds of its work.
Every run gets a new process group of the requested size over a new file store; afterwards each rank is reset to the
state of a new process (``rank_worker.reset``).

A rank that raises, dies or does not answer fails the run with a report from every rank (``RankFailure``). The whole
pool is then killed, and the next run starts a new one. Modelled on torch's
``testing/_internal/common_distributed.py``.
"""

from __future__ import annotations

import atexit
import importlib
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.helpers.rank_worker import Group, Job, Reply, serve

REPOSITORY = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 120.0
LOG_TAIL_BYTES = 8000
PRELOADED = ["tests.helpers.rank_worker", "tests.helpers.rank_imports"]
"""What the fork server imports."""


def install_cpu_platform() -> None:
    """Install the CPU platform: the default initializer, which a rank runs once before its first job."""
    importlib.import_module("megatron.zero_bubble.engine.platforms.cpu").install()


class RankFailure(Exception):
    """At least one rank raised, died or did not answer in time.

    Attributes:
        reports: per rank, ``"ok"`` or the failure: the traceback, the signal or exit status, or the stack at the
            timeout, followed by the end of the rank's output.
    """

    def __init__(self, summary: str, reports: dict[int, str]) -> None:
        self.reports = reports
        sections = (f"--- rank {rank}: {report.rstrip()}" for rank, report in sorted(reports.items()))
        super().__init__("\n".join([summary, *sections]))


@dataclass
class _Rank:
    """The parent's handle on one process of the pool."""

    process: BaseProcess
    connection: Connection
    log: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None, "the process was started"
        return self.process.pid

    def describe_death(self) -> str:
        self.process.join()
        status = self.process.exitcode or 0
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        return f"{how} before it answered\n{self.log_tail()}"

    def describe_silence(self) -> str:
        """Make the rank write its stack to its log: SIGUSR2 triggers its faulthandler."""
        before = self.log.stat().st_size
        os.kill(self.pid, signal.SIGUSR2)
        deadline = time.monotonic() + 1.0
        while self.log.stat().st_size == before and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        return f"did not answer; it was here:\n{self.log_tail()}"

    def log_tail(self) -> str:
        return self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")


MAX_THREADS = 400
"""Ranks with more threads are replaced. A megatron-core model with a distributed optimizer is never freed (its hooks
refer to it through autograd) and keeps 15 process groups alive, each with threads: after an hour of tests there would
be thousands, which slow the machine down."""


OVER_GLOO = Group()


class RankPool:
    """Runs functions on ranks 0 .. n-1, each in a process with torch.distributed initialized for n ranks.

    Args:
        initializer: a picklable top-level function, called once in every new process.
        group: the default process group of every run.
        forked: whether to fork the ranks from a server that has done the slow imports. Ranks on GPUs cannot be forked
            from it: an import may have used CUDA's driver.
    """

    def __init__(
        self,
        initializer: Callable[[], object] = install_cpu_platform,
        group: Group = OVER_GLOO,
        forked: bool = True,
    ) -> None:
        self._initializer = initializer
        self._forked = forked
        self._group = group
        self._ranks: list[_Rank] = []
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._serial = 0
        atexit.register(self.close)  # before multiprocessing's own exit, which would wait for the ranks

    def run(
        self,
        num_ranks: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        grace: float = 1.0,
        after: Callable[[int], object] | None = None,
    ) -> list[Any]:
        """Call ``fn(rank, *args)`` on ranks ``0 .. num_ranks - 1``; return their results in rank order.

        ``fn``, ``args`` and the results are pickled by value: tensors arrive as copies, and a view is sent with its
        whole storage, so return ``view.clone()``. Python, numpy and torch have the same seeds on every rank and run.

        Args:
            fn: a top-level function of an importable module.
            timeout: seconds for the slowest rank, excluding the start of the processes.
            grace: seconds for the other ranks to answer after one has failed; in a fault test, the time that its
                survivors have.
            after: called as ``after(rank)`` after ``fn`` has returned, while the process group still exists, e.g. to
                assert that no buffer, handle or patch is left.

        Raises:
            RankFailure: if a rank raised, died or did not answer within ``timeout``; the pool has been killed.
        """
        try:
            if any(_num_threads(pid) > MAX_THREADS for pid in self.pids()):
                self._kill()
            self._grow(num_ranks)
            self._serial += 1
            store = str(self._folder / f"store-{self._serial}")
            call = pickle.dumps((fn, args, after))
            jobs = [Job(rank, num_ranks, store, timeout, call, self._group) for rank in range(num_ranks)]
            name = f"{fn.__module__}.{fn.__qualname__}"
            results = self._exchange(jobs, f"{name} on {num_ranks} ranks", timeout, grace)
            self._exchange([None] * num_ranks, f"resetting the ranks after {name}", timeout, grace)
        except BaseException:
            self._kill()
            raise
        return results

    def pids(self) -> list[int]:
        """Return the process ids of the pool, in rank order."""
        return [rank.pid for rank in self._ranks]

    def close(self) -> None:
        """Kill every process and remove the pool's files."""
        atexit.unregister(self.close)
        self._kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _grow(self, num_ranks: int) -> None:
        """Start the missing processes in parallel."""
        first, started = len(self._ranks), range(len(self._ranks), num_ranks)
        if not started:
            return
        context = start_server() if self._forked else get_context("spawn")
        for index in started:
            ours, theirs = context.Pipe()
            log = self._folder / f"rank-{index}.log"
            log.touch()
            process = context.Process(target=serve, args=(theirs, str(log), self._initializer), name=f"rank-{index}")
            with environment():
                process.start()
            theirs.close()
            self._ranks.append(_Rank(process, ours, log))
        self._collect(self._ranks[first:], "starting the ranks", START_TIMEOUT_S, grace=1.0)

    def _exchange(self, jobs: Sequence[Job | None], what: str, timeout: float, grace: float) -> list[Any]:
        """Send one job to each rank and return the results."""
        ranks = self._ranks[: len(jobs)]
        for rank, job in zip(ranks, jobs, strict=True):
            with suppress(BrokenPipeError):  # it died since its last job, which _collect reports
                rank.connection.send_bytes(pickle.dumps(job))
        return self._collect(ranks, what, timeout, grace)

    def _collect(self, ranks: Sequence[_Rank], what: str, timeout: float, grace: float) -> list[Any]:
        """Wait for one reply from every rank; the first failure shortens the wait to ``grace``."""
        start = time.monotonic()
        deadline = start + timeout
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while len(results) + len(failures) < len(ranks) and (left := deadline - time.monotonic()) > 0:
            pending = [i for i in range(len(ranks)) if i not in results and i not in failures]
            waitables = [w for i in pending for w in (ranks[i].connection, ranks[i].process.sentinel)]
            ready = set(wait(waitables, timeout=left))
            unharmed = not failures
            for index in pending:
                rank = ranks[index]
                if rank.connection in ready or rank.process.sentinel in ready:
                    reply = _receive(rank.connection)
                    if reply is None:
                        failures[index] = rank.describe_death()
                    elif reply.error:
                        failures[index] = f"raised\n{reply.error}{rank.log_tail()}"
                    else:
                        results[index] = pickle.loads(reply.result)
            if unharmed and failures:
                deadline = min(deadline, time.monotonic() + grace)
        if len(results) == len(ranks):
            return [results[index] for index in range(len(ranks))]
        silent = [i for i in range(len(ranks)) if i not in results and i not in failures]
        elapsed = time.monotonic() - start
        failures |= {i: ranks[i].describe_silence() for i in silent}
        summary = f"{what}: {len(failures)} of {len(ranks)} ranks failed after {elapsed:.1f} s"
        raise RankFailure(summary, {i: failures.get(i, "ok") for i in range(len(ranks))})

    def _kill(self) -> None:
        for rank in self._ranks:
            with suppress(ProcessLookupError):  # the rank and its children, if it has started its session
                os.killpg(rank.pid, signal.SIGKILL)
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.process.close()
            rank.connection.close()
        self._ranks = []


def _num_threads(pid: int) -> int:
    """Return the number of threads; 0 if the process is gone or the system has no /proc."""
    return sum(1 for _ in Path(f"/proc/{pid}/task").glob("*"))


def _receive(connection: Connection) -> Reply | None:
    """Return the next reply, or None if the other end closed before a complete reply arrived."""
    try:
        return pickle.loads(connection.recv_bytes()) if connection.poll() else None
    except (EOFError, ConnectionResetError):
        return None


def start_server() -> ForkServerContext:
    """Start the fork server with the ranks' environment and imports; return the context that starts ranks."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with environment():
        forkserver.ensure_running()
    return context


def environment() -> AbstractContextManager[None]:
    """Context in which started processes get the environment of ranks."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), str(REPOSITORY / "examples"), os.environ.get("PYTHONPATH")]))
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    return _environment(
        PYTHONPATH=path, OMP_NUM_THREADS="1", CUDA_DEVICE_MAX_CONNECTIONS=queues, TORCHDYNAMO_DISABLE="1"
    )


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Add ``values`` to ``os.environ`` within this context, for a child process to inherit."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
