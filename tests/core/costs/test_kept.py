"""Tests of what low precision and recomputation change in the tensors of a layer."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.core.costs.kept import Kept, Tensor, operand
from megatron.zero_bubble.core.costs.precision import BF16, PRECISIONS

STATE, PRODUCT, BOTH = Tensor(100.0), operand(10.0, "mlp"), Tensor(1.0, ("layernorm",), of_product=True)
TENSORS = (STATE, PRODUCT, BOTH)


@pytest.mark.parametrize(
    ("kept", "size", "dropped"),
    [
        (Kept(), 111.0 + 0.5, 0.0),
        (Kept(dropout=False), 111.0, 0.0),
        (Kept(("mlp",)), 101.0 + 0.5, 10.0),
        (Kept(("layernorm", "mlp")), 100.0 + 0.5, 11.0),
        (Kept((), PRECISIONS["delayed"].operand_bytes), 100.0 + 5.0 + 1.5 + 0.5, 0.0),
        (Kept(("layernorm",), PRECISIONS["delayed"].operand_bytes), 100.0 + 5.0 + 0.5, 1.0),
    ],
)
def test_bytes(kept: Kept, size: float, dropped: float) -> None:
    """What matrix products take shrinks, and has a copy of its own where anything else takes it, too."""
    assert kept.of(TENSORS, mask=0.5) == (111.5, size, dropped)


def test_scales_of_blocks_take_memory() -> None:
    precisions = [BF16, *(PRECISIONS[name] for name in ("mxfp8", "blockwise", "nvfp4"))]
    sizes = [Kept((), precision.operand_bytes).operand_share for precision in precisions]
    assert sizes == [1.0, 0.5 + 1 / 64, 0.5, 0.25 + 1 / 32]
