"""Operands of TransformerEngine's weight gradients, which may be quantized: in FP8, MXFP8 or NVFP4.

A quantized tensor is no ``torch.Tensor`` of data, but has one or two: its rows, and its columns, each quantized along
the dimension that a GEMM sums over, with its scales (TransformerEngine 2.8 to 2.20, ``pytorch/tensor/storage``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch


def tensors(operands: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors of operands, which may be lists of them; of a quantized one, its data and scales."""
    for operand in operands:
        if hasattr(operand, "get_data_tensors"):
            yield from tensors(operand.get_data_tensors())
        elif isinstance(operand, (list, tuple)):
            yield from tensors(operand)
        elif isinstance(operand, torch.Tensor):
            yield operand


def keep_columns(gradient: Any) -> None:
    """Free the row-wise half of an output gradient, or of those of all experts, when its input gradient is computed.

    TransformerEngine makes both halves, and computes the input gradient from the rows; W multiplies the columns. What
    serves both stays (per-tensor scaling on Blackwell), and so do tensors in high precision.
    """
    for one in gradient if isinstance(gradient, (list, tuple)) else (gradient,):
        if hasattr(one, "update_usage"):
            one.update_usage(rowwise_usage=False, columnwise_usage=True)
