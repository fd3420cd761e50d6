"""The layers of a hybrid model, one letter each: ``--hybrid-layer-pattern M-M*|M-ME`` for two stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from megatron.zero_bubble.core.formats.layout_string import read_hybrid

FLAG, OLD_FLAG = "--hybrid-layer-pattern", "--hybrid-override-pattern"


@dataclass(frozen=True)
class Pattern:
    """The layers of a hybrid model.

    Attributes:
        flag: the flag that has the pattern.
        text: the pattern as it was given.
        stages: the letters of each stage, or all of them if the pattern leaves the division to Megatron.
        predictions: the letters of each layer of multi-token prediction.
    """

    flag: str
    text: str
    stages: tuple[str, ...]
    predictions: tuple[str, ...]

    @property
    def layers(self) -> str:
        """The letters of all layers, in model order."""
        return "".join(self.stages)

    def cut(self, counts: Sequence[int]) -> str:
        """Write the pattern with these numbers of layers per stage."""
        ends = accumulate(counts, initial=0)
        stages = "|".join(self.layers[start:end] for start, end in pairwise(ends))
        return "/".join((stages, *self.predictions))


def pattern_of(args: Any) -> Pattern | None:
    """Read the pattern in the flags of a Megatron-LM job; None if they have none.

    Raises:
        UserError: a letter that has no meaning.
    """
    for flag in (FLAG, OLD_FLAG):
        if text := getattr(args, name_of(flag), None):
            return Pattern(flag, text, *read_hybrid(text))
    return None


def contents(args: Any, layers: Sequence[int]) -> Sequence[int | str]:
    """Return what each stage has of the layers: its letters in a hybrid model, else its number, as in ``layers``."""
    pattern = pattern_of(args)
    return layers if pattern is None else pattern.cut(layers).partition("/")[0].split("|")


def name_of(flag: str) -> str:
    """Return the name of a flag in a job's arguments."""
    return flag.removeprefix("--").replace("-", "_")
