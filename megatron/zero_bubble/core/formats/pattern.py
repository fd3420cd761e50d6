"""The layers of a hybrid model, one letter each, whose ``|`` divide them into stages: ``M-M*|M-ME``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from megatron.zero_bubble.core.formats.layout import layout_text
from megatron.zero_bubble.core.formats.layout_string import FLAG as LAYOUT_FLAG
from megatron.zero_bubble.core.formats.layout_string import layout_layers

FLAG = "--hybrid-layer-pattern"
"""The flag of a pattern, since megatron-core 0.17."""


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

    @property
    def layout(self) -> str | None:
        """Its stages as Megatron's ``--pipeline-model-parallel-layout``; None if it leaves them to Megatron."""
        if len(self.stages) == 1:
            return None
        return layout_text([len(stage) for stage in self.stages])[:-1] + "m" * len(self.predictions) + "L"

    def cut(self, counts: Sequence[int]) -> str:
        """Write the pattern with these numbers of layers per stage."""
        ends = accumulate(counts, initial=0)
        stages = "|".join(self.layers[start:end] for start, end in pairwise(ends))
        return "/".join((stages, *self.predictions))

    def laid_out(self, layout: str | None) -> str:
        """Write the pattern with the stages of a layout, or without any."""
        return self.cut((len(self.layers),) if layout is None else layout_layers(layout))


def layout_words(layout: str, pattern: Pattern | None) -> tuple[str, str]:
    """The flag, and its value, that give a job the stages of a layout; ``pattern`` is that of a hybrid model."""
    return (LAYOUT_FLAG, layout) if pattern is None else (pattern.flag, pattern.laid_out(layout))
