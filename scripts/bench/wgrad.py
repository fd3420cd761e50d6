"""Deferred weight gradients: compare the runtime's computation with the library's GEMM.

There is one line per shape and one for the W pass of a whole layer: microseconds, rate, and the ratio to the time of
the library's bare GEMM of the same shape and dtype. For float32 that is ``main_grad.addmm_`` (beta=1, no temporary),
for narrow dtypes ``torch.mm`` into a narrow result, without accumulation. "unfused" is the computation of
megatron-core: a separate product, rounded, then added to the float32 gradient. On a GPU, "apex" and
"transformer_engine" are the accumulating products of these packages, where they are installed. The last lines fold
several microbatches into one GEMM.

    bash scripts/bench.sh wgrad [--device cpu] [--hidden-size 1024] [--tokens 2048] [--dtype float32 bfloat16]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from bench import page, ranks
from megatron.zero_bubble.engine.kernels import Kernels, reference, select

LIBRARY, FUSED, SINGLE, FOLDED = "library", "fused", "one by one", "folded"


class Shape(NamedTuple):
    """A weight of shape (out, in)."""

    name: str
    out: int
    width: int


def main() -> None:
    """Measure every dtype in turn."""
    options = _parse()
    torch.set_num_threads(options.threads)
    kernels = select(options.device)
    h = options.hidden_size
    layer = [Shape("qkv", 3 * h, h), Shape("proj", h, h), Shape("fc1", 4 * h, h), Shape("fc2", h, 4 * h)]
    print(f"{options.tokens} tokens, {options.device}, {options.threads} thread(s), ops: {kernels.words}")
    results = [_measure(options, kernels, layer, getattr(torch, dtype)) for dtype in options.dtype]
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    settings = {"hidden_size": h, "tokens": options.tokens, "rounds": options.rounds, "threads": options.threads}
    page.report("wgrad", {"device": device, **settings, "results": results}, options.output)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--microbatches", type=int, default=4, help="number of microbatches to fold into one GEMM")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, default=Path("runs/bench/wgrad.json"))
    return parser.parse_args()


def _measure(options: argparse.Namespace, kernels: Kernels, layer: list[Shape], dtype: torch.dtype) -> dict[str, Any]:
    rows = []
    for shapes in [*([shape] for shape in layer), layer]:
        name = shapes[0].name if len(shapes) == 1 else "layer"
        work = 2 * options.tokens * sum(shape.out * shape.width for shape in shapes)
        values = ranks.interleaved(_variants(options, kernels, shapes, dtype), options.rounds)
        rows += _rows(dtype, name, work, values, LIBRARY)
    rows += _folding(options, kernels, layer, dtype)
    return {"dtype": str(dtype), "rows": rows}


def _rows(
    dtype: torch.dtype, weights: str, work: int, values: dict[str, list[float]], base: str
) -> list[dict[str, Any]]:
    return [
        {
            "dtype": str(dtype).removeprefix("torch."),
            "weights": weights,
            "variant": variant,
            "gflops": work / median(row) / 1e3,
            "reference": base,
            "rounds_us": row,
        }
        for variant, row in values.items()
    ]


def _operands(
    options: argparse.Namespace, shapes: list[Shape], dtype: torch.dtype, tokens: int
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    inputs = [torch.randn(tokens, shape.width, device=options.device).to(dtype) for shape in shapes]
    grads = [torch.randn(tokens, shape.out, device=options.device).to(dtype) for shape in shapes]
    return inputs, grads, [torch.zeros(shape.out, shape.width, device=options.device) for shape in shapes]


def _variants(
    options: argparse.Namespace, kernels: Kernels, shapes: list[Shape], dtype: torch.dtype
) -> dict[str, Callable[[], float]]:
    inputs, grads, main_grads = _operands(options, shapes, dtype, options.tokens)
    results = [torch.empty_like(grad, dtype=dtype) for grad in main_grads]

    def library() -> None:
        for x, dy, grad, result in zip(inputs, grads, main_grads, results, strict=True):
            if dtype is torch.float32:
                grad.addmm_(dy.t(), x)
            else:
                torch.mm(dy.t(), x, out=result)

    def unfused() -> None:
        for x, dy, grad in zip(inputs, grads, main_grads, strict=True):
            grad.add_(dy.t().matmul(x))

    variants = {
        LIBRARY: library,
        FUSED: lambda: kernels.ops.wgrad_accumulate_many(inputs, grads, main_grads, []),
        "reference": lambda: reference.wgrad_accumulate_many(inputs, grads, main_grads, []),
        "unfused": unfused,
    }
    if options.device == "cuda":
        variants |= installed_variants(inputs, grads, main_grads)
    return {name: _timed(run, options.device) for name, run in variants.items()}


def installed_variants(
    inputs: list[torch.Tensor], grads: list[torch.Tensor], main_grads: list[torch.Tensor]
) -> dict[str, Callable[[], None]]:
    """The products of apex and TransformerEngine that accumulate into float32, of those packages that are installed."""
    variants: dict[str, Callable[[], None]] = {}
    if find_spec("fused_weight_gradient_mlp_cuda"):  # an extension of apex
        accumulate = import_module("fused_weight_gradient_mlp_cuda").wgrad_gemm_accum_fp32

        def apex() -> None:
            for operands in zip(inputs, grads, main_grads, strict=True):
                accumulate(*operands)

        variants["apex"] = apex
    if find_spec("transformer_engine") and find_spec("transformer_engine.pytorch"):
        gemm = import_module("transformer_engine.pytorch.cpp_extensions").general_gemm
        options = {"out_dtype": torch.float32, "layout": "NT", "grad": True, "accumulate": True}
        if "workspace" in signature(gemm).parameters:  # until 2.10
            options["workspace"] = import_module("transformer_engine.pytorch.module.base").get_workspace()

        def transformer_engine() -> None:
            for x, dy, main_grad in zip(inputs, grads, main_grads, strict=True):
                gemm(x, dy, out=main_grad, **options)

        variants["transformer_engine"] = transformer_engine
    return variants


def _folding(
    options: argparse.Namespace, kernels: Kernels, layer: list[Shape], dtype: torch.dtype
) -> list[dict[str, Any]]:
    """Several microbatches of one weight: one GEMM each, or one GEMM over the concatenated tokens of all of them."""
    rows = []
    count, tokens = options.microbatches, options.tokens
    for share in (tokens // count, tokens):
        shape = layer[2]
        parts = [_operands(options, [shape], dtype, share) for _ in range(count)]
        inputs, grads = ([part[i][0] for part in parts] for i in (0, 1))
        main_grad = parts[0][2][0]

        def one_by_one(inputs: Any = inputs, grads: Any = grads, main_grad: Any = main_grad) -> None:
            kernels.ops.wgrad_accumulate_many(inputs, grads, [main_grad] * count, [])

        def folded(inputs: Any = inputs, grads: Any = grads, main_grad: Any = main_grad) -> None:
            kernels.ops.wgrad_accumulate(torch.cat(inputs), torch.cat(grads), main_grad)

        variants = {SINGLE: _timed(one_by_one, options.device), FOLDED: _timed(folded, options.device)}
        values = ranks.interleaved(variants, options.rounds)
        work = 2 * count * share * shape.out * shape.width
        rows += _rows(dtype, f"fc1, {count} x {share}", work, values, SINGLE)
    return rows


def _timed(run: Callable[[], None], device: str) -> Callable[[], float]:
    """Microseconds per call; on a GPU, the time of its work there, averaged over several calls."""
    if device == "cpu":

        def on_cpu() -> float:
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) * 1e6

        return on_cpu

    def on_gpu(calls: int = 20) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / calls

    return on_gpu


if __name__ == "__main__":
    main()
