"""The machine: its GPU and driver, and the two rates that no step can exceed."""

from __future__ import annotations

import subprocess
import sys

import torch

from gpu_day import step


def main() -> int:
    """Measure a copy within the device's memory and a bfloat16 product of square matrices."""
    parser = step.parser(__doc__)
    parser.add_argument("--mib", type=int, default=4096, help="size of the copy")
    parser.add_argument("--size", type=int, default=8192, help="rows and columns of the matrices")
    options = parser.parse_args()
    if options.device == "cuda":
        subprocess.run(["nvidia-smi"], check=True)
    source = torch.empty(options.mib * 2**20, dtype=torch.uint8, device=options.device)
    target = torch.empty_like(source)
    copy_us = step.time_us(lambda: target.copy_(source), options.device, rounds=5)
    a, b = (torch.randn(options.size, options.size, device=options.device).bfloat16() for _ in range(2))
    product_us = step.time_us(lambda: a @ b, options.device, rounds=5)
    figures = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "copy_gb_per_s": 2 * options.mib * 2**20 / copy_us / 1e3,  # bytes read and written
        "bf16_tflops": 2 * options.size**3 / product_us / 1e6,
    }
    step.write(options.output, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
