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


def keep_columns(gradient: Any, scales_by_rows: bool) -> None:
    """Free the row-wise half of an output gradient, or of those of all experts, when its input gradient is computed.

    TransformerEngine makes both halves, and computes the input gradient from the rows; W multiplies the columns. What
    serves both stays (per-tensor scaling on Blackwell), and so do tensors in high precision.

    Args:
        scales_by_rows: whether a product of NVFP4 finds the scale of a whole tensor only in the half of its rows, also
            if it multiplies the columns (TransformerEngine before 2.11). Without that half, it would not scale.
    """
    for one in gradient if isinstance(gradient, (list, tuple)) else (gradient,):
        needs_rows = scales_by_rows and getattr(one, "_amax_rowwise", None) is not None
        if hasattr(one, "update_usage") and not needs_rows:
            one.update_usage(rowwise_usage=False, columnwise_usage=True)
