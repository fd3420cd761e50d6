"""The shapes of attention: heads with keys of their own or in groups, and multi-head latent attention.

Latent attention (DeepSeek-V2, arXiv 2405.04434) projects the hidden states down to a few features, normalizes these,
and makes queries, keys and values of them; a part of each key, which carries the position, is shared by all heads.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Attention:
    """What attention makes of a token, on all tensor-parallel ranks together.

    Attributes:
        queries, keys, values, outputs: features of all heads.
        compressed: features between the projections of latent attention.
        weights: number of weights in its matrices.
        whole_weights: those of them that every tensor-parallel rank has as a whole: the projections down.
        up_weights: those that make queries, keys and values of the compressed features.
    """

    queries: int
    keys: int
    values: int
    outputs: int
    weights: int
    compressed: int = 0
    whole_weights: int = 0
    up_weights: int = 0

    @classmethod
    def of_heads(cls, hidden: int, heads: int, groups: int, head_size: int) -> Attention:
        """Attention with ``groups`` heads of keys and of values."""
        own, shared = heads * head_size, groups * head_size
        return cls(own, shared, shared, own, hidden * 2 * (own + shared))

    @property
    def made(self) -> int:
        """Features of queries, keys and values together."""
        return self.queries + self.keys + self.values

    def rank_weights(self, split: int) -> float:
        """Number of weights of each of ``split`` tensor-parallel ranks."""
        return (self.weights - self.whole_weights) / split + self.whole_weights

    def computed(self, split: int, whole: int) -> float:
        """Number of weights with which a token is multiplied, on ``split`` ranks that divide tokens by ``whole``."""
        return self.weights + self.whole_weights * (split / whole - 1)


@dataclass(frozen=True)
class Latent:
    """The shapes of latent attention, under Megatron's names and with its defaults.

    Attributes:
        query_rank: ``--q-lora-rank``; None if queries are made of the hidden states.
        rank: ``--kv-lora-rank``.
        head_size, position_size, value_size: ``--qk-head-dim``, ``--qk-pos-emb-head-dim`` and ``--v-head-dim``.
    """

    query_rank: int | None = None
    rank: int = 32
    head_size: int = 128
    position_size: int = 64
    value_size: int = 128

    def of(self, hidden: int, heads: int) -> Attention:
        queries, values = heads * (self.head_size + self.position_size), heads * self.value_size
        up = self.rank * heads * (self.head_size + self.value_size) + (self.query_rank or hidden) * queries
        down = hidden * (self.rank + self.position_size + (self.query_rank or 0))
        compressed = self.rank + (self.query_rank or 0)
        return Attention(queries, queries, values, values, up + down + values * hidden, compressed, down, up)

    def projections(self, hidden: int, heads: int) -> tuple[tuple[str, int, int], ...]:
        """The linear layers before attention: their names in megatron-core, and their numbers of inputs and outputs."""
        queries, compressed = heads * (self.head_size + self.position_size), self.query_rank
        of_queries: tuple[tuple[str, int, int], ...] = (("linear_q_proj", hidden, queries),)
        if compressed is not None:
            of_queries = ("linear_q_down_proj", hidden, compressed), ("linear_q_up_proj", compressed, queries)
        return (
            *of_queries,
            ("linear_kv_down_proj", hidden, self.rank + self.position_size),
            ("linear_kv_up_proj", self.rank, heads * (self.head_size + self.value_size)),
        )
