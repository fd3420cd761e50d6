"""A new decision of a job, defined outside the package: one row of the table, and one field of the setup."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from megatron.zero_bubble.planning import codecs, values
from megatron.zero_bubble.planning.codecs import Medium, difference, parse, spell, speller
from megatron.zero_bubble.planning.decision import SWITCH, Decision, PlanFlag
from megatron.zero_bubble.planning.setup import Named, Setup

ROWS = (
    Decision("graphs", "advanced", SWITCH, "capture passes", path="graphs", plan=PlanFlag("graphs", SWITCH)),
    Decision("slots", "advanced", "N", "microbatches in flight", parse=int, path="slots"),
)


@dataclass(frozen=True)
class _Setup(Setup):
    graphs: bool = False
    slots: int | None = None


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    known, of_plan = (*values.ROWS, *ROWS), (*values.PLAN_ROWS, ROWS[0])
    for module in (values, codecs):
        monkeypatch.setattr(module, "ROWS", known)
        monkeypatch.setattr(module, "PLAN_ROWS", of_plan)
    monkeypatch.setattr(codecs, "DECISIONS", (*codecs.DECISIONS, *ROWS))
    monkeypatch.setattr(values, "Setup", _Setup)


@pytest.mark.parametrize("medium", ["job", "env", "json"])
def test_every_medium_spells_it(medium: Medium) -> None:
    setup = parse("--zero-bubble-schedule zb-h1 --zero-bubble-graphs --zero-bubble-slots 3".split())
    assert setup == _Setup(Named("zb-h1"), graphs=True, slots=3)
    assert parse(spell(setup, medium), medium) == setup


def test_a_plan_has_what_it_has_a_flag_for() -> None:
    setup = parse(["--schedule", "zb-h1", "--graphs"], "plan")
    assert setup == _Setup(Named("zb-h1"), graphs=True)
    assert parse(spell(setup, "query"), "query") == setup


def test_it_is_added_and_left_out_and_named_to_its_reader() -> None:
    old, new = _Setup(graphs=True), _Setup(slots=2)
    assert difference(old, new) == (("--zero-bubble-slots", "2"), ("--zero-bubble-graphs",))
    assert speller("job")("slots", 2) == "--zero-bubble-slots 2" and speller("env")("slots", 2) == "ZERO_BUBBLE_SLOTS=2"
