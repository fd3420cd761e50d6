"""What sparse attention takes besides the latent attention that it is: an indexer, which scores all tokens before each
one and picks a few of them to attend to (DeepSeek-V3.2, arXiv 2512.02556).

Every tensor-parallel rank computes all of the indexer. Its inputs are detached, so it has no gradient of them: B has
the gradients of its scores, W those of its weights, and neither without a loss of its own. The target of this loss is
the attention of all heads, whose scores F and B compute for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.zero_bubble.core.costs.layer_work import LayerWork

_INDEX = 4
"""Bytes of the number of a token that was picked."""


@dataclass(frozen=True)
class Indexer:
    """The shapes of an indexer, under Megatron's names.

    Attributes:
        heads, size: ``--dsa-indexer-n-heads`` and ``--dsa-indexer-head-dim``.
        picked: ``--dsa-indexer-topk``.
        trained: whether it has a loss (``--dsa-indexer-loss-coeff``).
        sparse_loss: whether that is over the tokens that are picked (``--dsa-indexer-use-sparse-loss``).
    """

    heads: int
    size: int
    picked: int
    trained: bool = False
    sparse_loss: bool = False

    def weights(self, hidden: int, inputs: int) -> int:
        """Number of its weights; queries are made of ``inputs`` features, keys and weights of heads of ``hidden``."""
        return inputs * self.heads * self.size + hidden * (self.size + self.heads)

    def attended(self, sequence: int) -> float:
        """The tokens that attention computes for each one, in the mean of a sequence with a causal mask."""
        picked = min(self.picked, sequence)
        return picked - picked**2 / (2 * sequence)

    def work(self, tokens: int, sequence: int, hidden: int, inputs: int, target: int, copies: int) -> LayerWork:
        """Operations and bytes of one layer.

        Args:
            sequence: tokens of whole sequences.
            inputs: as in ``weights``.
            target: features of the keys of all heads of attention.
            copies: ranks that compute all of it.
        """
        projections = 2.0 * tokens * self.weights(hidden, inputs)
        scores = 2.0 * tokens * (sequence / 2) * self.heads * self.size
        compared = self.attended(sequence) if self.sparse_loss else sequence / 2
        loss = 2.0 * tokens * compared * target / copies if self.trained else 0.0
        made, taken = (self.heads + 1) * self.size + self.heads, inputs + hidden
        kept = tokens * (_INDEX * min(self.picked, sequence) + 2.0 * made * self.trained)
        return LayerWork(
            copies * (projections + scores + loss),
            copies * (3 * scores + loss) if self.trained else 0.0,
            copies * projections if self.trained else 0.0,
            tokens * (2.0 * made + _INDEX * min(self.picked, sequence)),
            kept,
            2.0 * tokens * (made + taken) if self.trained else 0.0,
        )
