"""Duration of the passes of vocabulary parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.zero_bubble.core.costs.terms import settle
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Pass
from megatron.zero_bubble.core.ir.passes import I, J, S, T


@dataclass(frozen=True)
class VocabularyCosts:
    """Milliseconds per rank of the passes of its shards of the vocabulary (``ir.vocabulary``).

    Attributes:
        output_ms: S, the forward of the output layer's shard, with algorithm 2 also its input gradient.
        output_wgrad_ms: T, its weight gradient, with algorithm 1 also its input gradient.
        embedding_ms: I, the forward of the embedding's shard (default: 0).
        embedding_wgrad_ms: J, its weight gradient (default: 0).
        collective_ms: the time that a collective takes in addition to one transfer between its ranks.

    Raises:
        UserError: for a negative or non-finite figure, or lists of different lengths.
    """

    output_ms: tuple[float, ...]
    output_wgrad_ms: tuple[float, ...]
    embedding_ms: tuple[float, ...] = ()
    embedding_wgrad_ms: tuple[float, ...] = ()
    collective_ms: float = 0.0

    def __post_init__(self) -> None:
        settle(self, "vocabulary")

    @classmethod
    def uniform(
        cls,
        num_ranks: int,
        output_ms: float,
        output_wgrad_ms: float,
        embedding_ms: float = 0.0,
        embedding_wgrad_ms: float = 0.0,
        collective_ms: float = 0.0,
    ) -> VocabularyCosts:
        s, t, i, j = (
            (figure,) * num_ranks for figure in (output_ms, output_wgrad_ms, embedding_ms, embedding_wgrad_ms)
        )
        return cls(s, t, i, j, collective_ms)

    @property
    def num_ranks(self) -> int:
        return len(self.output_ms)

    def duration(self, p: Pass) -> float:
        """Milliseconds of ``p``; the loss function (L) counts as a part of its collectives."""
        figures = {S: self.output_ms, T: self.output_wgrad_ms, I: self.embedding_ms, J: self.embedding_wgrad_ms}
        return figures[p.kind][p.stage] if p.kind in figures else 0.0

    def work_ms(self, rank: int) -> float:
        """The ms that a rank spends on the vocabulary per microbatch."""
        return (
            self.output_ms[rank] + self.output_wgrad_ms[rank] + self.embedding_ms[rank] + self.embedding_wgrad_ms[rank]
        )


def required(costs: VocabularyCosts | None) -> VocabularyCosts:
    """Return the figures of vocabulary parallelism.

    Raises:
        UserError: when there are none.
    """
    if costs is None:
        raise UserError(
            "a schedule with vocabulary passes needs their times, and the costs have none; give output_ms and "
            "output_wgrad_ms"
        )
    return costs
