"""Twenty weight gradients of odd shapes with biases, compared with float64, under the memory checker of CUDA.

The checker is ``compute-sanitizer`` of CUDA's toolkit. It refuses some GPUs, such as virtual ones; the step is then
skipped. With ``--device cpu`` the products run without it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from gpu_day import step
from megatron.zero_bubble.engine.kernels import select

SHAPES = ((1, 1, 1), (3, 5, 7), (17, 33, 65), (63, 127, 129), (255, 257, 31))
"""Tokens, inputs and outputs."""
REFUSAL = "Device not supported"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def main() -> int:
    """Run the products, on a GPU in a process of the checker; return its exit status."""
    parser = step.parser(__doc__)
    parser.add_argument("--checked", action="store_true", help="this is the process that the checker runs")
    options = parser.parse_args()
    if options.device == "cpu" or options.checked:
        step.write(options.output, {"products": products(options.device), "errors": None})
        return 0
    toolkit = Path("/usr/local/cuda/bin/compute-sanitizer")
    checker = shutil.which("compute-sanitizer") or (str(toolkit) if toolkit.exists() else None)
    if checker is None:
        raise SystemExit("compute-sanitizer is not installed; install CUDA's toolkit, or put its bin folder on PATH")
    command = [checker, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", "gpu_day.memory_check"]
    # The caching allocator would hide accesses behind the end of a tensor.
    result = subprocess.run(
        [*command, "--checked", "--device", "cuda", "--output", str(options.output)],
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    print(result.stdout, result.stderr, sep="\n")
    figures, code = outcome(result.returncode, result.stdout + result.stderr)
    step.write(options.output, figures)
    return code


def outcome(code: int, text: str) -> tuple[dict[str, Any], int]:
    """The figures, and the exit status, that follow from the checker's exit status and what it printed."""
    if REFUSAL in text:
        return {"skip_reason": "compute-sanitizer does not support this device"}, 0
    found = re.search(r"ERROR SUMMARY: (\d+) error", text)
    errors = int(found[1]) if found else None
    return {"products": len(SHAPES) * 4, "errors": errors}, code or int(errors != 0)


def products(device: str) -> int:
    """Compare the products with float64; return their number.

    Raises:
        AssertionError: a gradient or a bias differs.
    """
    torch.manual_seed(1)
    ops, count = select(device).ops, 0
    for tokens, width, out in SHAPES:
        for dtype, narrow in (*((dtype, False) for dtype in DTYPES), (torch.bfloat16, True)):
            x, dy = (torch.randn(tokens, size).to(device, dtype) for size in (width, out))
            wide = dtype if narrow else torch.float32
            grad, bias = torch.zeros(out, width, device=device, dtype=wide), torch.zeros(out, device=device)
            ops.wgrad_accumulate_many([x], [dy], [grad], [bias])
            tolerance = 2e-2 if narrow else 1e-3
            exact = dy.double().t() @ x.double()
            torch.testing.assert_close(grad.double(), exact, rtol=tolerance, atol=tolerance * 10)
            torch.testing.assert_close(bias.double(), dy.double().sum(0), rtol=tolerance, atol=tolerance * 10)
            count += 1
    return count


if __name__ == "__main__":
    sys.exit(main())
