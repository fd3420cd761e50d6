"""A new decision of a job, defined outside the package: one row of the table, and one field of the setup, or of a value
in it, with which it reaches the plan.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.zero_bubble.cli.plan import add_plan, question_of
from megatron.zero_bubble.cli.vocabulary import divided_of
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir.vocabulary import Divided
from megatron.zero_bubble.planning import codecs, values
from megatron.zero_bubble.planning.answer import Answer, answer
from megatron.zero_bubble.planning.codecs import Medium, difference, parse, spell, speller
from megatron.zero_bubble.planning.decision import SWITCH, Decision, PlanFlag
from megatron.zero_bubble.planning.plan_file import decided
from megatron.zero_bubble.planning.setup import Named, Setup

ROWS = (
    Decision("graphs", "advanced", SWITCH, "capture passes", path="graphs", plan=PlanFlag("graphs", SWITCH)),
    Decision("slots", "advanced", "N", "microbatches in flight", parse=int, path="slots"),
)
IN_PARTS = PlanFlag("loss-in-parts", SWITCH, help="compute the losses in parts")
OF_VOCABULARY = Decision("loss-in-parts", "advanced", SWITCH, IN_PARTS.help, path="vocabulary.in_parts", plan=IN_PARTS)
COSTS = Path(__file__).parents[2] / "configs" / "published" / "vocabulary_a100"


@dataclass(frozen=True)
class _Setup(Setup):
    graphs: bool = False
    slots: int | None = None


@dataclass(frozen=True)
class _Divided(Divided):
    in_parts: bool = False


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    known, of_plan = (*values.ROWS, *ROWS, OF_VOCABULARY), (*values.PLAN_ROWS, ROWS[0], OF_VOCABULARY)
    for module in (values, codecs):
        monkeypatch.setattr(module, "ROWS", known)
        monkeypatch.setattr(module, "PLAN_ROWS", of_plan)
    monkeypatch.setattr(codecs, "DECISIONS", (*codecs.DECISIONS, *ROWS, OF_VOCABULARY))
    monkeypatch.setattr(values, "Setup", _Setup)
    monkeypatch.setitem(values._SECTIONS, "vocabulary", _Divided)


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


def asked(name: str) -> tuple[Divided | None, Answer]:
    """How the flags of ``plan`` divide the vocabulary, and their answer, for published costs."""
    parser = argparse.ArgumentParser()
    add_plan(parser)
    IN_PARTS.add(parser)
    sizes = f"--num-ranks 8 --num-microbatches 8 --costs {COSTS / name}.json"
    options = parser.parse_args(f"--schedule zb-h1 {sizes} --vocabulary 2 --loss-in-parts".split())
    question = question_of(options)
    return divided_of(options, question.costs), answer(question)


def test_what_refines_another_decision_reaches_the_plan_inside_its_value() -> None:
    flags = "--zero-bubble-schedule zb-h1 --zero-bubble-vocabulary-parallel 2 --zero-bubble-loss-in-parts"
    setup = parse(flags.split())
    assert setup.vocabulary == _Divided(2, in_parts=True)
    assert parse(spell(setup)) == parse(spell(setup, "env"), "env") == parse(spell(setup, "json"), "json") == setup
    divided, made = asked("stock_64k")
    assert divided == made.divided == decided(made).divided == _Divided(2, in_parts=True)
    with pytest.raises(UserError, match="changes only estimated times"):
        asked("vocabulary_2_64k")
