"""Tests of advice for a job whose vocabulary is not known."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.cli.advise import changed
from megatron.zero_bubble.cli.assumed_vocabulary import OTHER_SIZES
from tests.cli.test_advise import SMALL, Capture, advice

OWN = ("--gpus-per-node", "4", "--quick")
UNKNOWN = changed(SMALL, ["--tokenizer-type", "HuggingFaceTokenizer"], ["--vocab-size"])
"""A job whose tokenizer is elsewhere."""


def stated(size: int) -> list[str]:
    """The same job with a vocabulary."""
    return [*UNKNOWN, "--vocab-size", str(size)]


def test_advice_says_what_it_rests_on(capsys: Capture) -> None:
    """Next to the headline, with the idle share and the gain of other vocabularies."""
    assert main(["advise", *OWN, "--", *UNKNOWN]) == 0
    lines = capsys.readouterr().out.splitlines()
    (at,) = (number for number, line in enumerate(lines) if line.startswith("This rests on an assumed vocabulary of"))
    assert lines[at - 1].startswith("Add ")
    assert "take 20% more or less, or the vocabulary is another)" in lines[at - 1]
    assert all(f"with {size:,}, its ranks idle " in lines[at] for size in OTHER_SIZES)
    assert lines[at].endswith("give --vocab-size.")
    assert main(["advise", *OWN, "--", *stated(50_304)]) == 0
    assert "rests on" not in capsys.readouterr().out


def test_figures_are_those_of_a_job_that_says_it(capsys: Capture) -> None:
    """A schedule by name does not depend on costs, so that its row shows the gain."""
    found = advice(capsys, UNKNOWN, *OWN)
    best = found["advice"][found["best"] - 1]["name"]
    others = found["other_vocabularies"]
    assert [each["size"] for each in others] == list(OTHER_SIZES)
    assert others[0]["idle"] < others[1]["idle"]
    rows = 0
    for each in others:
        of_size = advice(capsys, stated(each["size"]), *OWN)
        assert sum(of_size["job"]["idle"].values()) == pytest.approx(each["idle"])
        gains = [row["gain"] for row in of_size["advice"] if row["name"] == best]
        assert gains == pytest.approx([each["gain"]] * len(gains))
        assert of_size["other_vocabularies"] == []
        rows += len(gains)
    assert rows
