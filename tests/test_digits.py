"""Numbers in files and flags are written in the digits 0 to 9: ``int`` takes those of all scripts."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.zero_bubble.core.costs.units import parse_bytes, parse_memory_limit
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.layout_string import read_layout
from megatron.zero_bubble.core.ir import Pass, Value
from megatron.zero_bubble.core.plan.offload import parse_share
from megatron.zero_bubble.planning.decision import iterations, token_counts, unit_microbatches
from pretrain.checkpoint_folder import TRACKER, latest_iteration

THREE = "\u0663"


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (Pass.parse, "0F3"),
        (Pass.parse, "3F0.3"),
        (Value.parse, "3F0"),
        (read_layout, "Et*3|tL"),
        (parse_bytes, "3GiB"),
        (parse_memory_limit, "3p"),
        (parse_share, "33%"),
        (iterations, "3-33"),
        (token_counts, "3,33"),
        (unit_microbatches, "3"),
    ],
)
def test_digits_of_other_scripts_are_refused(parse: Callable[[str], object], text: str) -> None:
    parse(text)
    with pytest.raises((UserError, argparse.ArgumentTypeError)):
        parse(text.replace("3", THREE))


def test_the_number_of_a_checkpoint_too(tmp_path: Path) -> None:
    for text in (THREE, "\u00b2"):
        (tmp_path / TRACKER).write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match="must contain an iteration number"):
            latest_iteration(tmp_path)


def test_a_range_of_iterations_may_be_beyond_any_size() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="at most .* iterations can be recorded"):
        iterations(f"1-{10**30}")
