"""The pattern of a job that trains a hybrid model: ``--hybrid-layer-pattern M-M*|M-ME`` for two stages."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from megatron.zero_bubble.core.formats.layout_string import read_hybrid
from megatron.zero_bubble.core.formats.pattern import FLAG, Pattern

OLD_FLAG = "--hybrid-override-pattern"


def pattern_of(args: Any) -> Pattern | None:
    """Read the pattern in the flags of a Megatron-LM job; None if they have none.

    Raises:
        UserError: a letter that has no meaning.
    """
    for flag in (FLAG, OLD_FLAG):
        if text := getattr(args, name_of(flag), None):
            return Pattern(flag, text, *read_hybrid(text))
    return None


def pattern_in(words: Sequence[str]) -> Pattern | None:
    """Read the pattern in the words of a job; None if they have none."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in (FLAG, OLD_FLAG):
        parser.add_argument(flag)
    return pattern_of(parser.parse_known_args(list(words))[0])


def contents(args: Any, layers: Sequence[int]) -> Sequence[int | str]:
    """Return what each stage has of the layers: its letters in a hybrid model, else its number, as in ``layers``."""
    pattern = pattern_of(args)
    return layers if pattern is None else pattern.cut(layers).partition("/")[0].split("|")


def set_layout(args: Any, layout: str | None) -> None:
    """Give a job the stages of a layout, by the flag that it has for them."""
    if (pattern := pattern_of(args)) is None:
        args.pipeline_model_parallel_layout = layout
    else:
        setattr(args, name_of(pattern.flag), pattern.laid_out(layout))


def name_of(flag: str) -> str:
    """Return the name of a flag in a job's arguments."""
    return flag.removeprefix("--").replace("-", "_")
