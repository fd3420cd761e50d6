"""Bytes that a linear of TransformerEngine keeps in FP8 from its backward until its delayed weight gradient."""

from __future__ import annotations

import sys

import torch

from gpu_day import step

TOKENS, SIZE = 4096, 4096


def main() -> int:
    """Measure the memory that the weight gradient frees, per element of its two operands."""
    options = step.parser(__doc__).parse_args()
    import transformer_engine.pytorch as te

    linear = te.Linear(SIZE, SIZE, bias=False, params_dtype=torch.bfloat16, delay_wgrad_compute=True)
    x = torch.randn(TOKENS, SIZE, device=options.device, dtype=torch.bfloat16, requires_grad=True)
    with te.fp8_autocast(enabled=True):
        output = linear(x)
    output.backward(torch.randn_like(output))
    del output
    x.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    linear.backward_dw()
    torch.cuda.synchronize()
    weight_grad = linear.weight.grad
    added = 0 if weight_grad is None else weight_grad.untyped_storage().nbytes()
    kept = before - (torch.cuda.memory_allocated() - added)
    step.write(options.output, {"kept_bytes": kept, "bytes_per_element": kept / (2 * TOKENS * SIZE)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
