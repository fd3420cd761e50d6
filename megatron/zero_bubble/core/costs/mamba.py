"""What a Mamba layer takes: a scan over the tokens between two matrices (Mamba-2, arXiv 2405.21060).

The matrices are split like all others: W computes their weight gradients. The convolution and the scan stay whole in B,
together with the gradients of their few parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.zero_bubble.core.costs.kept import IN_16_BITS, Kept, Tensor, operand
from megatron.zero_bubble.core.costs.layer_work import LayerWork
from megatron.zero_bubble.core.costs.recurrence import recurrent_layer

_CONVOLUTION = 4
"""Tokens that the convolution in front of the scan sees."""
_BLOCK = 128
"""Tokens of a block of the scan, within which it is computed like attention."""


@dataclass(frozen=True)
class Mamba:
    """The shapes of Mamba layers, under Megatron's names and with its defaults.

    Attributes:
        heads: ``--mamba-num-heads``; None for as many as fill twice the hidden size.
        head_size, state, groups: ``--mamba-head-dim``, ``--mamba-state-dim`` and ``--mamba-num-groups``.
    """

    heads: int | None = None
    head_size: int = 64
    state: int = 128
    groups: int = 8

    def inner(self, hidden: int) -> int:
        """Features of all heads."""
        return 2 * hidden if self.heads is None else self.heads * self.head_size

    def weights(self, hidden: int) -> int:
        return hidden * (self._projected(hidden) + self.inner(hidden))

    def work(self, tokens: int, hidden: int, split: int, whole: int, kept: Kept = IN_16_BITS) -> LayerWork:
        """Operations and bytes of one layer.

        In a block of Q tokens, scores take 2 Q operations per token and feature of the state, and their products with
        the tokens 2 Q per feature of a head; from block to block, the state takes 4 per feature of a head and of the
        state. B repeats all that, because the kernel keeps only its input and its output, and takes twice as many
        operations besides.

        Args:
            split, whole: the number of ranks that divide what is inside the layer, and the hidden states.
            kept: what decides which tensors are kept.
        """
        inner, projected = self.inner(hidden), self._projected(hidden)
        of_groups = self.groups * self.state
        scan = 2.0 * _BLOCK * (of_groups + inner) + 4.0 * self.state * inner
        scan += 2.0 * _CONVOLUTION * (inner + 2 * of_groups)
        inside = (
            Tensor(2.0 * tokens * projected / split),  # the input of the scan
            Tensor(4.0 * tokens * inner / split),  # its output, before and after the gate
            operand(2.0 * tokens * inner / split),  # what the norm makes of it
        )
        return recurrent_layer(tokens, hidden, (projected, inner), scan, inside, (split, whole), kept)

    def states(self, hidden: int) -> float:
        """Bytes that a slice of a sequence hands to the next one: the state in float32, inputs of the convolution."""
        inner = self.inner(hidden)
        convolved = inner + 2 * self.groups * self.state
        return 4.0 * inner * self.state + 2.0 * (_CONVOLUTION - 1) * convolved

    def _projected(self, hidden: int) -> int:
        """Features that the first matrix makes: a gate and an input per head, B and C per group, a step per head."""
        inner = self.inner(hidden)
        heads = inner // self.head_size if self.heads is None else self.heads
        return 2 * inner + 2 * self.groups * self.state + heads
