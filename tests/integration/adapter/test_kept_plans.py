"""Tests of the command that keeps a plan of ``zb-auto``: it gives the same order again."""

from __future__ import annotations

import json
import random
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble.__main__ import main, parser
from megatron.zero_bubble.core.analysis.memory import peaks_in_order
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.formats.costs import costs_to_json
from megatron.zero_bubble.core.ir.queues import HardwareQueues
from megatron.zero_bubble.core.ir.vocabulary import Divided
from megatron.zero_bubble.planning import worker
from megatron.zero_bubble.planning.feasibility import Feasibility
from megatron.zero_bubble.planning.setup import Cuts, Searched, Setup, Synchronous, Validated
from megatron.zero_bubble.planning.worker import Request

GIB = float(2**30)


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=() if seed < 3 else pytest.mark.full) for seed in range(24)])
def test_the_printed_command_gives_the_same_order(seed: int, tmp_path: Path, capsys: Any) -> None:
    """Also where the limit was raised to the peak of the first schedule, or lowered to what can run."""
    from megatron.zero_bubble.integration.adapter.auto import AutoOptions, AutoSchedule

    rng = random.Random(seed)
    placement: Any = ("vee", "loop", "linear")[seed % 3]
    stages = 2 if placement == "linear" else 4
    times = [tuple(rng.uniform(*between) for _ in range(stages)) for between in ((0.5, 2.0), (0.5, 2.5), (0.3, 1.5))]
    sizes = [tuple(GIB * rng.uniform(*between) for _ in range(stages)) for between in ((0.3, 1.5), (0.2, 0.6))]
    costs, memory, objective = PassCosts(*times, 0.2), PassMemory(*sizes), rng.choice(("span", "makespan"))
    queues = HardwareQueues(1, "", "there is one queue", "32")
    runs = Feasibility(queues, rng.choice(("early", "late")))  # type: ignore[arg-type]
    step = Validated() if objective == "span" else Synchronous()
    setup = Setup(Searched(placement, limit="1p"), step=step)
    request = Request(costs_to_json(costs, memory), 2, rng.choice((4, 5)), setup, runs)
    found = worker.answered(request)
    unused: Any = None
    auto = AutoSchedule(AutoOptions(setup, runs), unused, unused)
    auto._costs, auto._memory_of, auto._used = costs, memory, found.within
    size = 2, request.num_microbatches
    (first,) = found.question.instead
    if found.schedule == first:  # nothing that a search finds can run
        said = auto._how_to_keep(size, auto._used_limit(size), first)
        assert said.startswith("nothing is needed" if first.name == "zb-auto" else "run --zero-bubble-schedule ")
        return
    words = shlex.split(auto._how_to_keep(size, auto._used_limit(size)).split("`")[1].partition(" >")[0])
    file = tmp_path / "costs.json"
    file.write_text(request.costs)
    words[words.index("FILE")] = str(file)
    assert main(words[1:]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["order"] == [list(row) for row in found.schedule.to_text()]
    limit = found.costs.limit(auto._used_limit(size))
    assert max(peaks_in_order(found.schedule, found.costs.on(found.schedule.placement)[1])) <= limit * (1 + 1e-6)


@pytest.mark.parametrize(
    ("setup", "flags"),
    [
        (Setup(Searched("wave", 4, "2GiB")), {"placement": "wave", "memory_limit": "2GiB"}),
        (Setup(Searched(), vocabulary=Divided(2), step=Validated()), {"vocabulary": "2", "objective": "span"}),
        (Setup(Searched(), cuts=Cuts(2, "even")), {"slice_cuts": "0.5,1.0", "objective": "makespan"}),
    ],
)
def test_how_to_keep_a_plan_is_a_command_that_plan_accepts(setup: Setup, flags: dict[str, str]) -> None:
    from megatron.zero_bubble.integration.adapter.auto import AutoOptions, AutoSchedule

    unused: Any = None
    said = AutoSchedule(AutoOptions(setup), unused, unused)._how_to_keep((2, 4))
    words = shlex.split(said.split("`")[1].partition(" >")[0])
    parsed = vars(parser().parse_args(words[1:]))
    assert {name: str(parsed[name]) for name in flags} == flags
