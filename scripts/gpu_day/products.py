"""Weight gradients of a transformer layer's linears: the fused op against the library's bare product.

The base is the product that the library computes fastest: without accumulation into a narrow result for bfloat16, into
the float32 gradient for float32. "unfused" is megatron-core's computation, a rounded product that is then added. On a
GPU the names of the kernels of the largest size show the tiles and the split of the sum that cuBLASLt chose.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gpu_day import step
from megatron.zero_bubble.engine.kernels import reference, select

WEIGHTS = {"qkv": (3, 1), "fc1": (4, 1), "fc2": (1, 4)}
"""Rows and columns of each weight, in hidden sizes."""
FLOPS_PER_ROUND = 2e12
"""Float32 on an H200 needs 40 ms for them; ten calls of the largest products would take most of a step's time."""
BASE, FUSED, ENGINE = "library", "fused", "TransformerEngine"


def main() -> int:
    """Measure every weight, hidden size and dtype."""
    parser = step.parser(__doc__)
    parser.add_argument("--hidden-size", type=int, nargs="+", required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(f"ops: {select(options.device).words}")
    rows = [
        _row(options.device, options.rounds, options.tokens, size, weight, dtype, size == max(options.hidden_size))
        for size in options.hidden_size
        for dtype in options.dtype
        for weight in WEIGHTS
    ]
    step.write(options.output, {"rows": rows, **_shares(rows)})
    return 0


def _shares(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The median share of the library's speed, per dtype, and of TransformerEngine's product if it was measured."""
    shares = {
        dtype: median(row["us"][BASE] / row["us"][FUSED] for row in rows if row["dtype"] == dtype)
        for dtype in sorted({row["dtype"] for row in rows})
    }
    engine = [row["us"][BASE] / row["us"][ENGINE] for row in rows if ENGINE in row["us"]]
    return {**shares, **({"engine": median(engine)} if engine else {})}


def _row(device: str, rounds: int, tokens: int, size: int, weight: str, name: str, is_profiled: bool) -> dict[str, Any]:
    dtype = getattr(torch, name)
    out, width = (factor * size for factor in WEIGHTS[weight])
    x, dy = (torch.randn(tokens, columns, device=device).to(dtype) for columns in (width, out))
    variants = _variants(x, dy, torch.zeros(out, width, device=device), torch.zeros(out, device=device))
    flops = 2 * tokens * out * width
    calls = max(1, min(10, int(FLOPS_PER_ROUND / flops)))
    times = {variant: step.time_us(run, device, rounds, calls) for variant, run in variants.items()}
    row = {"hidden_size": size, "dtype": name, "weight": weight, "us": times, "tflops": flops / times[FUSED] / 1e6}
    named = (BASE, FUSED) if is_profiled and device == "cuda" else ()
    return {**row, "kernels": {variant: _kernels(variants[variant]) for variant in named}}


def _variants(
    x: torch.Tensor, dy: torch.Tensor, grad: torch.Tensor, bias: torch.Tensor
) -> dict[str, Callable[[], object]]:
    ops, result = select(x.device.type).ops, torch.empty_like(grad, dtype=x.dtype)
    is_float32 = x.dtype is torch.float32
    variants: dict[str, Callable[[], object]] = {
        BASE: (lambda: grad.addmm_(dy.t(), x)) if is_float32 else (lambda: torch.mm(dy.t(), x, out=result)),
        FUSED: lambda: ops.wgrad_accumulate_many([x], [dy], [grad], []),
        "fused, bias": lambda: ops.wgrad_accumulate_many([x], [dy], [grad], [bias]),
        "reference": lambda: reference.wgrad_accumulate_many([x], [dy], [grad], []),
        "unfused": lambda: grad.add_(dy.t().matmul(x)),
    }
    if x.is_cuda and find_spec("transformer_engine") is not None:
        variants[ENGINE] = _engine(x, dy, grad)
    return variants


def _engine(x: torch.Tensor, dy: torch.Tensor, grad: torch.Tensor) -> Callable[[], object]:
    """TransformerEngine's accumulating product; before 2.10 it took a workspace."""
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    workspace = {}
    if "workspace" in inspect.signature(general_gemm).parameters:
        workspace["workspace"] = torch.empty(32 * 2**20, dtype=torch.uint8, device=x.device)
    return lambda: general_gemm(
        x, dy, out_dtype=torch.float32, layout="NT", grad=True, accumulate=True, out=grad, **workspace
    )


def _kernels(run: Callable[[], object]) -> list[str]:
    """The names of the GPU kernels of one call."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    return sorted({event.name for event in profiled.events() if event.device_type.name == "CUDA"})


if __name__ == "__main__":
    sys.exit(main())
