"""The table of options, and the rows as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble import SCHEDULES
from pair_matrix.options import NEUTRAL, OPTIONS, row_of, text_of

rows = st.fixed_dictionaries(
    {option: st.sampled_from([value.name for value in values]) for option, values in OPTIONS.items()}
)


@given(rows)
def test_text_of_a_row_is_read_back(row: dict[str, str]) -> None:
    assert row_of(text_of(row)) == row


def test_there_are_twenty_options_or_more_and_all_schedules() -> None:
    assert len(OPTIONS) >= 20 and all(len(values) >= 2 for values in OPTIONS.values())
    assert {value.name for value in OPTIONS["schedule"]} >= set(SCHEDULES)


def test_needs_are_values() -> None:
    for values in OPTIONS.values():
        for value in values:
            for option, name in value.needs.items():
                assert name in [one.name for one in OPTIONS[option]]
    assert row_of("") == NEUTRAL


@pytest.mark.parametrize(
    ("text", "message"),
    [("clips=1", "got clips=1; options are schedule, ranks"), ("clip=1", "clip has the values off, always, rarely")],
)
def test_unknown_words_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        row_of(text)
