"""From which time of a message on another schedule is shorter than the shortest of the table."""

from __future__ import annotations

import re

import pytest

from megatron.zero_bubble import PassCosts, PassMemory, Placement, build
from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.cli.break_even import Contenders
from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.offer import Offer

NAMES = {"zb-v": 96, "zb-h1": 48, "1f1b": 48}
"""Schedules of 4 ranks and 8 microbatches, and their messages."""


def made(name: str, message_ms: float = 0.0) -> Offer:
    def on(placement: Placement) -> tuple[PassCosts, PassMemory]:
        return PassCosts.uniform(placement, 10, 11, 8), PassMemory.uniform(placement)

    return Offer(build(name, num_ranks=4, num_microbatches=8), Figures(4, 8, on).with_messages(message_ms))


def ms(name: str, objective: Metric, message_ms: float) -> float:
    timeline = made(name, message_ms).timeline
    return timeline.span_ms if objective == "span" else timeline.makespan_ms


def contenders(objective: Metric, *names: str, message_ms: float = 0.0) -> Contenders:
    found = Contenders(objective)
    for name in names:
        found.add(made(name, message_ms), name, NAMES[name], ms(name, objective, message_ms))
    return found


@pytest.mark.parametrize("objective", ["span", "makespan"])
@pytest.mark.parametrize("given", [0.0, 0.1])
def test_it_is_where_the_lengths_cross(objective: Metric, given: float) -> None:
    at = contenders(objective, "1f1b", "zb-v", "zb-h1", message_ms=given).break_even()
    assert at is not None and (at.shortest, at.schedule) == ("zb-v", "zb-h1")
    assert ms("zb-h1", objective, at.message_ms - 0.01) > ms("zb-v", objective, at.message_ms - 0.01)
    assert ms("zb-h1", objective, at.message_ms + 0.01) < ms("zb-v", objective, at.message_ms + 0.01)
    shorter = f"zb-h1 is shorter than zb-v if a message takes more than {at.message_ms:.3g} ms"
    assert str(at) == f"{shorter}, with the passes of both in this order"


def test_nothing_is_said_where_no_schedule_with_fewer_messages_becomes_shorter() -> None:
    assert Contenders("span").break_even() is None
    assert contenders("span", "1f1b", "zb-h1").break_even() is None
    assert contenders("span", "1f1b", "zb-v").break_even() is None, "1f1b stays longer"
    assert contenders("span", "zb-v", "zb-h1", message_ms=5.0).break_even() is None, "zb-h1 is the shortest already"


def test_compare_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--num-ranks 3 --num-microbatches 6 --placement vee --equal-passes --max-chunks 2".split()
    main(["compare", *sizes, *"--forward-ms 10 --backward-ms 11 --wgrad-ms 8".split()])
    line = r"^.+ \(linear\) is shorter than .+ \(vee\) if a message takes more than \S+ ms, with the passes of both in "
    line += "this order$"
    assert re.search(line, capsys.readouterr().out, re.MULTILINE)
