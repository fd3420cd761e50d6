"""What a layer takes whose two matrices have a recurrence between them, as Mamba layers and gated delta nets have.

The matrices are split like all others: W computes their weight gradients. The recurrence stays whole in B, which
repeats it, because its kernel keeps only its inputs and its output, and takes twice as many operations besides.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.zero_bubble.core.costs.kept import Kept, Tensor, operand
from megatron.zero_bubble.core.costs.layer_work import LayerWork


def recurrent_layer(
    tokens: int,
    hidden: int,
    features: tuple[int, int],
    operations: float,
    inside: Sequence[Tensor],
    ranks: tuple[int, int],
    kept: Kept,
) -> LayerWork:
    """Operations and bytes of one layer.

    Args:
        features: those that the first matrix makes, and those that the last one takes.
        operations: those of the recurrence in F, per token.
        inside: the tensors in bf16 between the two matrices.
        ranks: those that divide what is inside the layer, and the hidden states.
        kept: what decides which tensors are kept.
    """
    (made, taken), (split, whole) = features, ranks
    matrices = 2.0 * tokens * hidden * (made + taken)
    around = (
        Tensor(2.0 * tokens * hidden / whole),  # the norm's input
        operand(2.0 * tokens * hidden / whole),  # its output
    )
    found = kept.of([*around, *inside], mask=tokens * hidden / whole)
    for_wgrad = tokens * ((2 * made + 2 * taken) / split + 4 * hidden / whole)
    return LayerWork(
        matrices + tokens * operations,
        matrices + 3 * tokens * operations,
        matrices,
        found.moved,
        found.kept,
        for_wgrad * kept.operand_share,
        linear=matrices,
        reductions=1,
    )
