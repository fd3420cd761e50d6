"""The keys of a costs file for vocabulary parallelism: the times of S, T, I and J, and the memory from S to T."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.zero_bubble.core.costs.memory import LOGITS, PassMemory
from megatron.zero_bubble.core.costs.passes import PassCosts
from megatron.zero_bubble.core.costs.units import checked_figure, checked_figures
from megatron.zero_bubble.core.costs.vocabulary import COLLECTIVE, VOCABULARY_TIMES, VocabularyCosts
from megatron.zero_bubble.core.errors import UserError

_REQUIRED = ("output_ms", "output_wgrad_ms")
KEYS = (*VOCABULARY_TIMES, COLLECTIVE, LOGITS)

RankFigure = float | tuple[float, ...]
"""A figure as written in the file: the same number for every rank, or one number per rank."""


@dataclass(frozen=True)
class VocabularyFigures:
    """What a costs file has about vocabulary parallelism.

    Attributes:
        times: figures of the passes, by key.
        collective_ms: as in ``VocabularyCosts``.
        logits: memory from S to T; None if the file does not have it.
    """

    times: Mapping[str, RankFigure]
    collective_ms: float = 0.0
    logits: RankFigure | None = None

    def costs(self, num_ranks: int) -> VocabularyCosts:
        """Return the times per rank.

        Raises:
            UserError: for lists with another number of ranks.
        """
        return VocabularyCosts(
            **{name: _per_rank(name, figure, num_ranks) for name, figure in self.times.items()},
            collective_ms=self.collective_ms,
        )

    def memory(self, num_ranks: int) -> tuple[float, ...]:
        """Return the memory from S to T per rank; empty if it is unknown.

        Raises:
            UserError: for a list with another number of ranks.
        """
        return () if self.logits is None else _per_rank(LOGITS, self.logits, num_ranks)


def vocabulary_content(costs: PassCosts, memory: PassMemory | None) -> dict[str, Any]:
    """Return the keys that ``vocabulary_from`` reads; none without vocabulary parallelism."""
    if (figures := costs.vocabulary) is None:
        return {}
    content: dict[str, Any] = {name: list(getattr(figures, name)) for name in VOCABULARY_TIMES}
    content[COLLECTIVE] = figures.collective_ms
    return content | ({LOGITS: list(memory.logits)} if memory is not None and memory.logits else {})


def vocabulary_from(content: Mapping[str, Any]) -> VocabularyFigures | None:
    """Read the keys of vocabulary parallelism; None if the file has none of them.

    Raises:
        UserError: for a figure of another form, or if the time of S or T is missing.
    """
    given = [key for key in KEYS if key in content]
    if not given:
        return None
    for name in _REQUIRED:
        if name not in content:
            raise UserError(
                f"{given[0]} needs {name} as well, one number for every rank or a list with one number per rank; it "
                "is missing"
            )
    times = {name: _figure(name, content[name]) for name in VOCABULARY_TIMES if name in content}
    logits = _figure(LOGITS, content[LOGITS]) if LOGITS in content else None
    return VocabularyFigures(times, checked_figure(COLLECTIVE, content.get(COLLECTIVE, 0.0)), logits)


def _figure(name: str, value: object) -> RankFigure:
    if isinstance(value, list):
        return checked_figures(name, value, "rank")
    return checked_figure(name, value)


def _per_rank(name: str, figure: RankFigure, num_ranks: int) -> tuple[float, ...]:
    figures = figure if isinstance(figure, tuple) else (figure,) * num_ranks
    if len(figures) != num_ranks:
        raise UserError(
            f"{name} must have one figure for each of the {num_ranks} ranks; got {len(figures)}; give as many, or a "
            "single number for every rank"
        )
    return figures
