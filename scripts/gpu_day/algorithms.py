"""Times of the first algorithms of cuBLASLt's heuristic for weight gradients, of which the fused op takes the first.

Calls the library that torch has loaded, as ``csrc/wgrad/cublaslt.cpp`` does: bfloat16 operands, accumulated in float32.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from functools import partial
from statistics import median
from typing import Any

import torch

from gpu_day import step
from gpu_day.products import WEIGHTS

WORKSPACE_BYTES = 32 * 2**20
_R_32F, _R_16BF, _COMPUTE_32F = 0, 14, 68
_TRANSPOSE_B, _OP_T, _MOST_WORKSPACE = 4, 1, 1
"""Of cublasLt.h and library_types.h."""


class _Found(ctypes.Structure):
    """``cublasLtMatmulHeuristicResult_t``."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


def main() -> int:
    """Measure every weight."""
    parser = step.parser(__doc__)
    parser.add_argument("--hidden-size", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--count", type=int, default=8)
    options = parser.parse_args()
    rows = [_row(options.hidden_size, options.tokens, options.count, weight) for weight in WEIGHTS]
    step.write(options.output, figures(rows))
    return 0


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By how much the best algorithm is faster than the first, at the median and at most."""
    gains = [1 - min(row["us"]) / row["us"][0] for row in rows]
    return {"count": max(len(row["us"]) for row in rows), "gain": median(gains), "most": max(gains), "rows": list(rows)}


def _row(size: int, tokens: int, count: int, weight: str) -> dict[str, Any]:
    out, width = (factor * size for factor in WEIGHTS[weight])
    x, dy = (torch.randn(tokens, columns, device="cuda").bfloat16() for columns in (width, out))
    grad = torch.zeros(out, width, device="cuda")
    return {"weight": weight, "us": [step.time_us(run, "cuda", 5) for run in _products(x, dy, grad, count)]}


def _products(x: torch.Tensor, dy: torch.Tensor, grad: torch.Tensor, count: int) -> list[Callable[[], object]]:
    """The product with each of the algorithms. cuBLASLt is column-major, so it sees every matrix transposed."""
    library = ctypes.CDLL(f"libcublasLt.so.{str(torch.version.cuda).partition('.')[0]}")
    (tokens, width), out = x.shape, dy.shape[1]
    handle, operation, preference = c_void_p(), c_void_p(), c_void_p()
    a, b, c = c_void_p(), c_void_p(), c_void_p()
    _check(library.cublasLtCreate(byref(handle)))
    _check(library.cublasLtMatmulDescCreate(byref(operation), _COMPUTE_32F, _R_32F))
    transposed, most = c_int(_OP_T), c_size_t(WORKSPACE_BYTES)
    _check(library.cublasLtMatmulDescSetAttribute(operation, _TRANSPOSE_B, byref(transposed), c_size_t(4)))
    for matrix, kind, rows, columns in (
        (a, _R_16BF, width, tokens),
        (b, _R_16BF, out, tokens),
        (c, _R_32F, width, out),
    ):
        sizes = c_uint64(rows), c_uint64(columns), c_int64(rows)
        _check(library.cublasLtMatrixLayoutCreate(byref(matrix), kind, *sizes))
    _check(library.cublasLtMatmulPreferenceCreate(byref(preference)))
    _check(library.cublasLtMatmulPreferenceSetAttribute(preference, _MOST_WORKSPACE, byref(most), c_size_t(8)))
    found, num_found = (_Found * count)(), c_int()
    asked = (handle, operation, a, b, c, c, preference, count, found, byref(num_found))
    _check(library.cublasLtMatmulAlgoGetHeuristic(*asked))
    one, workspace = c_float(1.0), torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    x_, dy_, grad_, space = (c_void_p(tensor.data_ptr()) for tensor in (x, dy, grad, workspace))

    def multiply(chosen: _Found, _kept: torch.Tensor = workspace) -> None:
        operands = (byref(one), x_, a, dy_, b, byref(one), grad_, c, grad_, c, byref(chosen, 0))
        stream = c_void_p(torch.cuda.current_stream().cuda_stream)
        _check(library.cublasLtMatmul(handle, operation, *operands, space, most, stream))

    return [partial(multiply, one_of) for one_of in found[: num_found.value] if one_of.state == 0]


def _check(status: int) -> None:
    """Raise RuntimeError if a call of the library failed."""
    if status:
        raise RuntimeError(f"cuBLASLt failed with status {status}")


if __name__ == "__main__":
    sys.exit(main())
