"""What a gated delta net takes: a chunked delta rule between two matrices (Gated DeltaNet, arXiv 2412.06464).

As in a Mamba layer, the matrices are split like all others, and the convolution and the recurrence stay whole in B.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.zero_bubble.core.costs.kept import IN_16_BITS, Kept, Tensor, operand
from megatron.zero_bubble.core.costs.layer_work import LayerWork
from megatron.zero_bubble.core.costs.recurrence import recurrent_layer

_BLOCK = 64
"""Tokens of a block of the recurrence, within which it is computed like attention."""


@dataclass(frozen=True)
class GatedDelta:
    """The shapes of gated delta nets, under Megatron's names and with its defaults.

    Attributes:
        key_heads, value_heads: ``--linear-num-key-heads`` and ``--linear-num-value-heads``.
        key_size, value_size: ``--linear-key-head-dim`` and ``--linear-value-head-dim``.
        convolution: ``--linear-conv-kernel-dim``.
    """

    key_heads: int = 16
    value_heads: int = 32
    key_size: int = 128
    value_size: int = 128
    convolution: int = 4

    @property
    def keys(self) -> int:
        """Features of all keys, of which there are as many as of queries."""
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        """Features of all values."""
        return self.value_heads * self.value_size

    def inner(self, hidden: int) -> int:
        """Features that the last matrix takes."""
        return self.values

    def weights(self, hidden: int) -> int:
        return hidden * (self._projected + self.values)

    def work(self, tokens: int, hidden: int, split: int, whole: int, kept: Kept = IN_16_BITS) -> LayerWork:
        """Operations and bytes of one layer.

        In a block of Q tokens, each value head takes 2 Q operations per token and feature for the products of keys with
        keys and with queries and for the two with values, and Q for each of the two solutions of a triangular system;
        from block to block, the state is read twice and written once at 2 per pair of features. B repeats that, because
        the kernel keeps only its inputs and its output, and takes twice as many operations besides.

        The arguments are those of ``Mamba.work``.
        """
        of_heads = self.value_heads * self.key_size  # keys as wide as each value head sees them
        rule = _BLOCK * (5.0 * of_heads + 5.0 * self.values) + 6.0 * self.key_size * self.values
        rule += 2.0 * self.convolution * (2 * self.keys + self.values)
        inside = (
            Tensor(2.0 * tokens * self._projected / split),  # the input of the convolution, and the gate
            Tensor(2.0 * tokens * (2 * self.keys + self.values) / split),  # its output
            Tensor(2.0 * tokens * self.values / split),  # that of the recurrence
            operand(2.0 * tokens * self.values / split),  # what the gated norm makes of it
        )
        features = self._projected, self.values
        return recurrent_layer(tokens, hidden, features, rule, inside, (split, whole), kept)

    def states(self, _hidden: int) -> float:
        """Bytes that a slice of a sequence hands to the next one: the state in float32, inputs of the convolution."""
        return 4.0 * self.key_size * self.values + 2.0 * (self.convolution - 1) * (2 * self.keys + self.values)

    @property
    def _projected(self) -> int:
        """Features that the first matrix makes: queries, keys, values and a gate, and two numbers per value head."""
        return 2 * self.keys + 2 * self.values + 2 * self.value_heads
