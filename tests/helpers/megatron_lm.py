"""Whole jobs of Megatron-LM's scripts, run from the checkouts listed in ``ZB_MEGATRON_LM``.

The variable lists folders, separated as in ``PATH``: clones of Megatron-LM at core_r0.13.0 to main. Each job uses the
megatron-core of its checkout. Tests that need a checkout are skipped if the variable is unset.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from tests.helpers.launch import LaunchedRank, LaunchServer
from tests.helpers.ports import free_port
from tests.helpers.warm_ranks import ForkedRank, WarmRanks

Rank: TypeAlias = "subprocess.Popen[bytes] | ForkedRank | LaunchedRank"
Forks: TypeAlias = "WarmRanks | LaunchServer"

VARIABLE = "ZB_MEGATRON_LM"
ROOT = Path(__file__).resolve().parents[2]
# A GPT with four layers, without the options that have no CPU kernels.
BASE_FLAGS = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --micro-batch-size 1 --global-batch-size 6 --train-iters 10 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine
    --lr-warmup-iters 2 --weight-decay 0.01 --attention-dropout 0 --hidden-dropout 0
    --mock-data --tokenizer-type NullTokenizer --vocab-size 5000 --make-vocab-size-divisible-by 8 --split 99,1,0
    --eval-iters 1 --eval-interval 1000 --log-interval 1 --num-workers 0
    --transformer-impl local --distributed-backend gloo --position-embedding-type rope --no-rope-fusion
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm --attention-backend unfused
"""
_BY_ITERATIONS = re.compile(r"--(train-iters|lr-warmup-iters) \d+")
_ITERATION = re.compile(r"iteration +\d+/.*nan iterations: +\d+")
_EVALUATION = re.compile(r"validation loss.*\|")
_TIMES = re.compile(r"(elapsed time per iteration \(ms\)|throughput per GPU \(TFLOP/s/GPU\)): [\d.]+ \| ?")


@dataclass(frozen=True)
class Checkout:
    """A Megatron-LM checkout and its megatron-core release, e.g. ``0.16``."""

    path: Path
    minor: str

    def __str__(self) -> str:
        return self.minor


def checkouts() -> list[Checkout]:
    """Return the checkouts listed in ``ZB_MEGATRON_LM``, oldest first."""
    found = []
    for folder in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        info = (Path(folder) / "megatron/core/package_info.py").read_text()
        numbers = dict(re.findall(r"^(MAJOR|MINOR) = (\d+)", info, re.MULTILINE))
        found.append(Checkout(Path(folder).resolve(), f"{numbers['MAJOR']}.{numbers['MINOR']}"))
    return sorted(found, key=lambda checkout: int(checkout.minor.partition(".")[2]))


@dataclass(frozen=True)
class Log:
    """Output of all ranks of a job, and their exit codes."""

    text: str
    exit_codes: Sequence[int | None]

    @property
    def weights(self) -> list[str]:
        """Sorted digests of all ranks' parameters after the last iteration; only jobs on ``WarmRanks`` print them."""
        return sorted(self.of("weights after "))

    @property
    def aborted_at_exit(self) -> bool:
        """Whether training completed and the C++ runtime then aborted a process at exit.

        On a busy machine this happens in about one job in a hundred, with and without our schedules.
        """
        aborted = "terminate called without an active exception" in self.text
        return aborted and set(self.exit_codes) <= {0, -signal.SIGABRT} and bool(self.weights)

    @property
    def figures(self) -> list[str]:
        """The printed lines of iterations and evaluations, without times."""
        lines = (_ITERATION.search(line) or _EVALUATION.search(line) for line in self.text.splitlines())
        return [_TIMES.sub("", found[0]) for found in lines if found]

    def of(self, start: str) -> list[str]:
        """Return the lines that begin with ``start``."""
        return [line for line in self.text.splitlines() if line.startswith(start)]


@dataclass
class RunningJob:
    """The processes of a running job, and their output files."""

    ranks: list[Rank]
    files: list[Path]
    _kept: list[str] | None = None

    @property
    def outputs(self) -> list[str]:
        """Output so far, per rank."""
        return self._kept or [file.read_text(errors="replace") if file.exists() else "" for file in self.files]

    @property
    def text(self) -> str:
        """Output so far of all ranks."""
        return "".join(self.outputs)

    def keep_outputs(self) -> None:
        """Read the output files into memory, before they are deleted."""
        self._kept = self.outputs

    def wait_for(self, printed: str, timeout: float = 200) -> None:
        """Wait until a rank has printed ``printed``.

        Raises:
            TimeoutError: if ``timeout`` seconds pass or a rank ends first; contains the output so far.
        """
        deadline = time.monotonic() + timeout
        while True:
            ended = any(rank.poll() is not None for rank in self.ranks)  # before reading what it printed last
            if printed in self.text:
                return
            if ended or time.monotonic() > deadline:
                raise TimeoutError(f"{printed!r} was not printed:\n{self.text[-4000:]}")
            time.sleep(0.01)

    def wait(self, timeout: float) -> list[int | None]:
        """Wait up to ``timeout`` seconds; return the exit code per rank, None for a rank that still runs."""
        deadline = time.monotonic() + timeout
        while any(rank.poll() is None for rank in self.ranks) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [rank.poll() for rank in self.ranks]


@dataclass(frozen=True)
class Job:
    """A script on ``num_ranks`` CPU ranks.

    Attributes:
        before: arguments between the interpreter and the script.
        spoiled: faults of gradients, as ``WarmRanks`` plants them.
        norm_as_tensor: let Megatron-LM clip by a norm that is a tensor, as it does with TransformerEngine.
    """

    script: Path
    num_ranks: int
    flags: tuple[str, ...]
    before: tuple[str, ...] = ("-m", "megatron.zero_bubble.launch")
    spoiled: str = ""
    norm_as_tensor: bool = False

    def run(self, timeout: float = 500, warm: Forks | None = None) -> Log:
        """Run all ranks to their end; if one fails, the others are killed after a while.

        Args:
            warm: fork the ranks from here, which saves their imports; for jobs that use the launcher.

        Raises:
            TimeoutError: contains the output so far.
        """
        with self.running(warm) as running:
            codes = _wait(running.ranks, timeout)
        if codes is None:
            raise TimeoutError(f"no end within {timeout:.0f} s:\n{running.text[-4000:]}")
        return Log(running.text, codes)

    @contextlib.contextmanager
    def running(self, warm: Forks | None = None) -> Iterator[RunningJob]:
        """Start all ranks; kill the remaining ones on exit from the context."""
        with tempfile.TemporaryDirectory() as folder:
            port = free_port()
            outputs = [Path(folder, f"rank-{rank}") for rank in range(self.num_ranks)]
            running = RunningJob(
                [self._start(rank, port, output, warm) for rank, output in enumerate(outputs)], outputs
            )
            try:
                yield running
            finally:
                for rank in running.ranks:
                    rank.kill()
                    rank.wait()
                running.keep_outputs()

    def _start(self, rank: int, port: int, output: Path, warm: Forks | None) -> Rank:
        of_rank = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_WORLD_SIZE": str(self.num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "SPOILED_GRADIENTS": self.spoiled,
            "NORM_AS_TENSOR": "1" if self.norm_as_tensor else "",
        }
        script = [str(self.script), *self.flags]
        if warm is not None:
            return warm.start(script, of_rank, output)
        with output.open("wb") as file:
            return subprocess.Popen(
                [sys.executable, *self.before, *script],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment() | of_rank,
                cwd="/",
            )


def environment() -> dict[str, str]:
    """Return the environment of every rank."""
    return os.environ | {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/helpers/other_versions")]),
    }


def _wait(ranks: Sequence[Rank], timeout: float) -> tuple[int, ...] | None:
    """Wait for all exit codes; 10 s after a rank fails, the others count as killed. None on timeout."""
    deadline = time.monotonic() + timeout
    while any(rank.poll() is None for rank in ranks):
        if time.monotonic() > deadline:
            if any(rank.poll() for rank in ranks):
                break
            return None
        if any(rank.poll() for rank in ranks):
            deadline = min(deadline, time.monotonic() + 10)
        time.sleep(0.05)
    codes = [rank.poll() for rank in ranks]
    return tuple(-9 if code is None else code for code in codes)


@functools.cache
def _data_cache() -> str:
    """Return a folder that caches sample orders across jobs; it is deleted when this process exits."""
    folder = tempfile.mkdtemp(prefix="megatron-lm-data-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def warm_ranks(script: Path, path: Path | None = None) -> WarmRanks:
    """Return the process that forks ranks for jobs of ``script``, with ``path`` on the path of its modules."""
    variables = environment()
    if path is not None:
        variables["PYTHONPATH"] += f"{os.pathsep}{path}"
    return WarmRanks(script, variables)


def _warm(checkout: Checkout) -> WarmRanks:
    return warm_ranks(checkout.path / "pretrain_gpt.py")


def pretrain_gpt(
    checkout: Checkout,
    num_ranks: int,
    flags: str,
    schedule: str | None,
    more: Sequence[str] = (),
    exact: bool = True,
    spoiled: str = "",
) -> Log:
    """Run the checkout's ``pretrain_gpt.py`` on CPU ranks to its end, with our schedule, or Megatron's own for None."""
    job = replace(gpt_job(checkout, num_ranks, flags, schedule, more, exact), spoiled=spoiled)
    log = job.run(warm=_warm(checkout))
    return job.run(warm=_warm(checkout)) if log.aborted_at_exit else log


def running_gpt(
    checkout: Checkout, num_ranks: int, flags: str, schedule: str
) -> contextlib.AbstractContextManager[RunningJob]:
    """Start the job of :func:`pretrain_gpt`."""
    return running(gpt_job(checkout, num_ranks, flags, schedule), checkout)


def running(job: Job, checkout: Checkout) -> contextlib.AbstractContextManager[RunningJob]:
    """Start a job whose ranks are forked with the checkout's imports done."""
    return job.running(_warm(checkout))


def gpt_job(
    checkout: Checkout,
    num_ranks: int,
    flags: str,
    schedule: str | None,
    more: Sequence[str] = (),
    exact: bool = True,
) -> Job:
    """Return the job of :func:`pretrain_gpt` without starting it."""
    own = ["--zero-bubble-device", "cpu"]
    if schedule is not None:
        own += ["--zero-bubble-schedule", schedule, *(["--zero-bubble-exact"] if exact else [])]
    # The length of a run is given in iterations or in samples, and the batch size is constant or a step schedule.
    base = _BY_ITERATIONS.sub("", BASE_FLAGS) if "--train-samples" in flags else BASE_FLAGS
    base = base.replace("--global-batch-size 6", "") if "--step-batch-size-schedule" in flags else base
    base = base.replace("--mock-data", "") if "data-path" in flags or "data-args-path" in flags else base
    arguments = (*base.split(), "--data-cache-path", _data_cache(), *flags.split(), *own, *more)
    return Job(checkout.path / "pretrain_gpt.py", num_ranks, arguments)


@functools.cache
def stock(checkout: Checkout, num_ranks: int, flags: str, more: tuple[str, ...] = (), spoiled: str = "") -> Log:
    """Run the same job with Megatron's own schedule; the result is cached."""
    log = pretrain_gpt(checkout, num_ranks, flags, None, more, spoiled=spoiled)
    assert log.exit_codes == (0,) * num_ranks, log.text[-4000:]
    return log
