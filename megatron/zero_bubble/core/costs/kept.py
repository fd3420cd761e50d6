"""Which tensors of a layer stay in memory until its backward: what low precision and selective recomputation change.

TransformerEngine's linears keep their inputs, and the gradients that W takes, in the precision of their products. What
is between the linears stays in 16 bits. Selective recomputation (Megatron's ``--recompute-modules``) drops the outputs
of modules after F, and B computes them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.zero_bubble.core.costs.precision import BF16

CORE_ATTENTION, UP_PROJECTION, LAYER_NORM = "core_attn", "mla_up_proj", "layernorm"
MLP, MOE, MOE_ACTIVATION, SHARED_EXPERTS = "mlp", "moe", "moe_act", "shared_experts"


class Tensor(NamedTuple):
    """A tensor that F keeps for B.

    Attributes:
        bytes: its size in bytes, in 16 bits, on one rank.
        modules: those whose recomputation drops it.
        of_product: whether a matrix product takes it, which keeps it in its own precision.
        of_others: whether anything else takes it, in 16 bits.
    """

    bytes: float
    modules: tuple[str, ...] = ()
    of_product: bool = False
    of_others: bool = True


def operand(size: float, *modules: str) -> Tensor:
    """A tensor that only a matrix product takes."""
    return Tensor(size, modules, of_product=True, of_others=False)


class Bytes(NamedTuple):
    """Bytes of the tensors of a layer.

    Attributes:
        moved: all of them, in 16 bits.
        kept: those that F keeps.
        dropped: those that recomputation drops, in 16 bits.
    """

    moved: float
    kept: float
    dropped: float


@dataclass(frozen=True)
class Kept:
    """What decides which tensors are kept.

    Attributes:
        modules: the modules that B computes again.
        operand_bytes: bytes per element of what matrix products take.
        dropout: whether masks of dropout are kept.
    """

    modules: tuple[str, ...] = (CORE_ATTENTION,)
    operand_bytes: float = BF16.operand_bytes
    dropout: bool = True

    def of(self, tensors: Sequence[Tensor], mask: float = 0.0) -> Bytes:
        """Add up tensors, and the bytes of a mask of dropout."""
        kept, dropped = (mask if self.dropout else 0.0), 0.0
        for tensor in tensors:
            if self.repeats(*tensor.modules):
                dropped += tensor.bytes
            else:
                kept += tensor.bytes * self._share(tensor)
        return Bytes(sum(tensor.bytes for tensor in tensors) + mask, kept, dropped)

    def repeats(self, *modules: str) -> bool:
        """Whether B computes what belongs to these modules again."""
        return any(module in self.modules for module in modules)

    @property
    def operand_share(self) -> float:
        """The size of what matrix products take, as a share of that in 16 bits."""
        return self.operand_bytes / BF16.operand_bytes

    def _share(self, tensor: Tensor) -> float:
        if not tensor.of_product or self.operand_share == 1:
            return 1.0
        return self.operand_share + tensor.of_others


IN_16_BITS = Kept()
"""What is kept in 16 bits, with dropout; with selective recomputation, all but the scores of attention."""
