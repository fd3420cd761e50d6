"""Planning in a separate process finds the same plan as the command, at the lowest priority."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from megatron.zero_bubble import Placement, simulate
from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.core.analysis.memory import most_kept
from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.costs.vocabulary import VocabularyCosts
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.costs import costs_to_json
from megatron.zero_bubble.core.ir import WHOLE, Slices
from megatron.zero_bubble.core.ir.vocabulary import Algorithm, Divided, algorithm_of
from megatron.zero_bubble.planning import worker
from megatron.zero_bubble.planning.job.runnable import check_runnable
from megatron.zero_bubble.planning.setup import Searched, Setup, Synchronous, Validated
from megatron.zero_bubble.planning.worker import Request
from tests.helpers.plans import schedule_from_json
from tests.helpers.sources import begun, cuts

COSTS = PassCosts((3.0, 2.0, 2.0, 4.5), (3.5, 2.1, 2.0, 5.0), (1.0, 1.2, 1.1, 2.0), 0.3, {(0, 1): 0.7})
MEMORY = PassMemory((2.0**30, 2.0**29, 2.0**29, 2.0**30), (2.0**28,) * 4)
REQUEST = Request(costs_to_json(COSTS, MEMORY), 2, 6, Setup(Searched("linear", limit="1p")))


@pytest.mark.parametrize(
    ("limit", "placement", "objective", "slices"),
    [
        ("1p", "linear", "makespan", WHOLE),
        ("2p", "linear", "span", WHOLE),
        pytest.param("1.2p", "vee", "span", WHOLE, marks=pytest.mark.full),
        pytest.param("3GiB", "vee", "makespan", WHOLE, marks=pytest.mark.full),
        ("0.8p", "linear", "makespan", Slices.even(4)),
        ("0.8p", "vee", "span", Slices((0.5, 0.25, 0.25))),
    ],
)
def test_worker_plan_equals_the_commands(
    limit: str,
    placement: Literal["linear", "vee"],
    objective: Metric,
    slices: Slices,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "costs.json"
    file.write_text(REQUEST.costs)
    flags = f"--num-ranks 2 --num-microbatches 6 --memory-limit {limit} --placement {placement} --objective {objective}"
    flags += f" --slice-cuts {','.join(map(str, slices.ends))}" if len(slices) > 1 else ""
    assert main(["plan", "--schedule", "zb-auto", *flags.split(), "--format", "json", "--costs", str(file)]) == 0
    expected = capsys.readouterr().out
    step = Validated() if objective == "span" else Synchronous()
    request = replace(REQUEST, setup=Setup(Searched(placement, limit=limit), cuts=cuts(slices), step=step))
    assert Request.from_json(request.to_json()) == request
    found = worker.plan(request)
    assert found.schedule == schedule_from_json(expected)
    assert found.makespan_ms == json.loads(expected)["makespan_ms"]


def run_worker(request: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", worker.__name__]
    return subprocess.run(command, input=request, capture_output=True, text=True, check=False)


def test_worker_process_returns_the_plan() -> None:
    done = run_worker(REQUEST.to_json())
    assert (done.returncode, done.stderr) == (0, "")
    assert schedule_from_json(done.stdout) == worker.plan(REQUEST).schedule


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"setup": {"schedule": "zb-auto", "memory_limit": "0.1p"}}, "the memory limit admits no schedule: "),
        (
            {"costs": "{}"},
            "it must have the key forward_ms, one number or a list with one number per stage; it is missing\n",
        ),
        (
            {"setup": {"schedule": "zb-auto", "placement": "circle"}},
            "argument --zero-bubble-placement: invalid choice: 'circle' (choose from ",
        ),
        ({"setup": "zb-auto"}, 'setup must be the decisions of a run; got "zb-auto"\n'),
        ({"num_ranks": 0}, "num_ranks must be a whole number above 0; got 0\n"),
    ],
)
def test_invalid_request_is_rejected_in_one_sentence(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as raised:
        worker.plan(Request.from_json(json.dumps(json.loads(REQUEST.to_json()) | changed)))
    assert f"{raised.value}\n".startswith(sentence)


def test_worker_process_prints_the_error() -> None:
    done = run_worker("[]")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "it must be a JSON object; got '[]'\n")


def test_worker_process_has_the_lowest_priority() -> None:
    command = [sys.executable, "-m", worker.__name__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 60
            while os.getpriority(os.PRIO_PROCESS, process.pid) < 19:
                assert time.monotonic() < deadline, "the process did not lower its priority"
                time.sleep(0.02)
        finally:
            process.kill()


@pytest.mark.parametrize("algorithm", [1, 2])
@pytest.mark.parametrize("limit", ["1p", "3p"])
def test_divided_vocabulary_is_planned_for(algorithm: Algorithm, limit: str) -> None:
    """The plan is never longer than the first schedule of the run, and by default takes no more memory."""
    costs = replace(PassCosts.uniform(Placement.linear(2), 3, 3, 2), vocabulary=VocabularyCosts.uniform(2, 2, 1))
    memory = PassMemory((2.0**30,) * 2, (2.0**28,) * 2, logits=(2.0**27,) * 2)
    request = Request(
        costs_to_json(costs, memory), 2, 6, Setup(Searched("linear", limit=limit), vocabulary=Divided(algorithm))
    )
    assert Request.from_json(request.to_json()) == request
    timeline = worker.plan(request)
    assert algorithm_of(timeline.schedule) == algorithm
    first = begun("linear", 2, vocabulary=algorithm).make(6)
    known = simulate(first, costs, memory)
    assert timeline.makespan_ms <= known.makespan_ms
    assert max(most_kept(timeline, memory)) <= (max(most_kept(known, memory)) if limit == "1p" else 6 * 2.0**30)
    check_runnable(timeline.schedule, 2, 6)
