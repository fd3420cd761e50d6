"""Run a client on CPU ranks, under stock Megatron and under schedules, and compare what it reads and its weights.

A client is a framework around megatron-core: a module of this package with a function ``load(checkout, folder)``, which
imports the framework and makes what all runs need, and a function ``train(run, folder)``. Each rank is a process that
loads once, and forks another one for each run, so that runs share nothing.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.helpers.megatron_lm import ROOT
from tests.helpers.ports import free_port
from tests.helpers.processes import wait_for

NUM_RANKS = 2


@dataclass(frozen=True)
class ClientRun:
    """One run.

    Attributes:
        schedule: the schedule, or None for stock Megatron.
        settings: what the client's ``train`` reads.
    """

    name: str
    schedule: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def variables(self) -> dict[str, str]:
        """The environment of its processes."""
        if self.schedule is None:
            return {}
        return {"ZERO_BUBBLE_SCHEDULE": self.schedule, "ZERO_BUBBLE_EXACT": "1"}


class Outcome(NamedTuple):
    """What a run has given.

    Attributes:
        seen: what the client has read, per rank, with digests in the place of tensors.
        weights: digests of the weights by their names in the whole model.
        output: what its ranks have printed.
    """

    seen: list[Any]
    weights: dict[str, str]
    output: str


def client(variable: str, *packages: str) -> list[Any]:
    """The markers of a module of tests on a client: its variable names a checkout, and its packages are installed."""
    missing = [name for name in packages if find_spec(name) is None]
    reason = f"{variable} names no checkout" if not os.environ.get(variable) else f"not installed: {', '.join(missing)}"
    is_absent = not os.environ.get(variable) or bool(missing)
    return [pytest.mark.full, pytest.mark.skipif(is_absent, reason=reason), pytest.mark.timeout(900)]


def run_client(module: str, variable: str, runs: Sequence[ClientRun], folder: Path, timeout: float = 800) -> Outcomes:
    """Run all ``runs``, one after the other.

    Args:
        module: the client's module in this package.
        folder: for the output, the rendezvous of the ranks, and what the client writes.
    """
    described = [asdict(run) | {"variables": run.variables, "port": free_port()} for run in runs]
    (folder / "runs.json").write_text(json.dumps(described))
    ours = [str(ROOT), os.environ[variable], *filter(None, [os.environ.get("PYTHONPATH")])]
    common = {**os.environ, "PYTHONPATH": os.pathsep.join(ours), "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    common |= {"WORLD_SIZE": str(NUM_RANKS), "LOCAL_WORLD_SIZE": str(NUM_RANKS), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.helpers.clients.rank", module, os.environ[variable]]
    ranks = []
    for rank in range(NUM_RANKS):
        own = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (folder / f"output-{rank}").open("wb") as file:
            pipes: dict[str, Any] = {"stdout": file, "stderr": subprocess.STDOUT, "start_new_session": True}
            ranks.append(subprocess.Popen([*command, str(folder)], env=own, cwd=folder, **pipes))
    wait_for(ranks, timeout)
    for each in ranks:
        if each.poll() is None:  # those that wait for one that failed, with the processes that they have forked
            os.killpg(each.pid, signal.SIGKILL)
    codes = [each.wait() for each in ranks]
    assert codes == [0] * NUM_RANKS, [(folder / f"output-{rank}").read_text()[-6000:] for rank in range(NUM_RANKS)]
    return Outcomes({run.name: _outcome(run, folder) for run in runs})


def _outcome(run: ClientRun, folder: Path) -> Outcome:
    found = [json.loads((folder / f"{run.name}-{rank}.json").read_text()) for rank in range(NUM_RANKS)]
    weights = functools.reduce(lambda one, other: one | other, (each["weights"] for each in found))
    output = "".join((folder / f"{run.name}-{rank}.log").read_text(errors="replace") for rank in range(NUM_RANKS))
    return Outcome([each["seen"] for each in found], weights, output)


class Outcomes(dict[str, Outcome]):
    """The outcomes of runs by their names."""

    def check_equal(self, name: str, stock: str, seen: Callable[[Any], Any] = lambda each: each) -> None:
        """Check that a run equals its stock run, and that only the first was under a schedule.

        Args:
            seen: what is compared of all that a run has read.
        """
        ours, theirs = self[name], self[stock]
        assert any(theirs.seen) and theirs.weights
        assert seen(ours.seen) == seen(theirs.seen)
        assert ours.weights == theirs.weights
        assert "zero-bubble: schedule " in ours.output and "by the environment" in ours.output
        assert "zero-bubble: " not in theirs.output


def without_norms(name: str) -> Callable[[list[list[Any]]], list[list[Any]]]:
    """What ranks have read but for the metric ``name``, a norm whose parts are added in the order of the ranks."""

    def without(seen: list[list[Any]]) -> list[list[Any]]:
        assert any(isinstance(each, dict) and name in each for of_rank in seen for each in of_rank)
        return [[_but(each, name) for each in of_rank] for of_rank in seen]

    return without


def _but(each: Any, name: str) -> Any:
    return {key: value for key, value in each.items() if key != name} if isinstance(each, dict) else each
