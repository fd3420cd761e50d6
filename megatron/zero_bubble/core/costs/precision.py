"""The precisions in which linear layers compute; attention, the router and the output layer stay in bf16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Format = Literal["bf16", "fp8", "fp4"]


@dataclass(frozen=True)
class Precision:
    """How linear layers compute.

    Attributes:
        name: in words.
        format: that of the operands of products, whose peak a device has.
        share: the share of the device's efficiency that products of this format reach.
        moved: bytes that are moved to quantize an element of an operand: it is read in bf16, once more where its
            largest value is needed first, and written in the rows and in the columns that products take.
        operand_bytes: size of an element of an operand, with its part of the scales of a block.
    """

    name: str
    format: Format
    share: float = 1.0
    moved: float = 0.0
    operand_bytes: float = 2.0


BF16 = Precision("bf16", "bf16")
# Products in FP8 draw more power per operation, so that clocks fall; the scales of blocks add to them. Those in FP4 are
# bound by memory and launches sooner, and rotate an operand of weight gradients (a Hadamard transform).
PRECISIONS = {
    "delayed": Precision("FP8 with delayed scaling", "fp8", 0.95, 4.0, 1.0),
    "tensorwise": Precision("FP8 with current scaling", "fp8", 0.95, 6.0, 1.0),
    "blockwise": Precision("FP8 with blockwise scaling", "fp8", 0.85, 4.0, 1.0),
    "mxfp8": Precision("MXFP8", "fp8", 0.95, 4.0, 1 + 1 / 32),
    "nvfp4": Precision("NVFP4", "fp4", 0.80, 8.0, 1 / 2 + 1 / 16),
}
"""By the names of ``--fp8-recipe`` and ``--fp4-recipe``."""
