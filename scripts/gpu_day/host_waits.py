"""Which calls of CUDA make the host wait until the GPU is idle, while a kernel spins as a waiting receive of NCCL does.

A rank whose host waits in such a call cannot start the pass for which another rank's receive waits. Every action runs
on another stream than the kernel, which ends when the host has returned, or at a time limit: then the host waited.
Two controls show that the measurement works: a kernel that was used before must not wait, and a synchronization must.
``CUDA_MODULE_LOADING`` decides when CUDA loads kernels.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from gpu_day import step

LIMIT_NS = 2_000_000_000
MIB = 2**20
KNOWN, SYNCHRONIZE = "known kernel", "synchronize"
"""The controls."""
Action = Callable[[], object]


class Spins(Protocol):
    """The part of ``spin.Spinner`` that is used here."""

    def start(self) -> None:
        """Let blocks spin."""

    def stop(self) -> int:
        """End them; return the number of blocks that did not reach the time limit."""


def main() -> int:
    """Measure every action; return 1 if a control shows that the measurement is invalid."""
    options = step.parser(__doc__).parse_args()
    from gpu_day import spin  # needs a GPU

    spinner, other = spin.Spinner(1, LIMIT_NS), torch.cuda.Stream()

    def on_other(work: Action) -> Action:
        def run() -> None:
            with torch.cuda.stream(other):
                work()

        return run

    rows = [measure(name, on_other(work), spinner) for name, work in actions()]
    step.write(options.output, {**figures(rows), "loading": os.environ.get("CUDA_MODULE_LOADING", "LAZY")})
    if problem := invalid(rows):
        print(problem)
    return int(bool(problem))


def measure(name: str, work: Action, spinner: Spins, clock: Callable[[], float] = time.perf_counter) -> dict[str, Any]:
    """Time until the host returns from ``work``, and whether the blocks had to end before."""
    spinner.start()
    began = clock()
    work()
    ms = 1e3 * (clock() - began)
    return {"action": name, "ms": ms, "waits": not spinner.stop()}


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The rows, and the names of the actions that wait, apart from the control that always does."""
    waiting = [row["action"] for row in rows if row["waits"] and row["action"] != SYNCHRONIZE]
    return {"waiting": ", ".join(waiting) or "nothing", "num_actions": len(rows) - 2, "rows": list(rows)}


def invalid(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """What the controls say against the measurement."""
    waits = {row["action"]: row["waits"] for row in rows}
    if waits[KNOWN]:
        return "a kernel that was used before waited for the spinning one: they do not run at the same time"
    if not waits[SYNCHRONIZE]:
        return "a synchronization did not wait: the spinning kernel did not run"
    return None


def actions() -> Iterator[tuple[str, Action]]:
    """Each action when its inputs are ready. None runs a kernel of its kind before, so the order matters."""
    x, y, out = (torch.ones(1024, device="cuda") for _ in range(3))
    x.mul_(2.0)
    yield KNOWN, lambda: x.mul_(2.0)
    yield "new torch kernel", lambda: torch.nextafter(x, y, out=out)
    yield "new Triton kernel", _triton(x)
    torch.cuda.empty_cache()
    yield "cudaMalloc", lambda: torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    yield "cudaFree", torch.cuda.empty_cache  # frees what the last action left in torch's cache
    block = torch.zeros(64 * MIB, dtype=torch.uint8)
    runtime = torch.cuda.cudart()
    yield "cudaHostRegister", lambda: runtime.cudaHostRegister(block.data_ptr(), block.numel(), 0)
    yield "cudaHostUnregister", lambda: runtime.cudaHostUnregister(block.data_ptr())
    yield "cudaHostAlloc", lambda: torch.empty(64 * MIB, dtype=torch.uint8, pin_memory=True)
    for name, dtype in (("first product", torch.bfloat16), ("product of another dtype", torch.float32)):
        a, b, c = (torch.ones(256, 256, device="cuda", dtype=dtype) for _ in range(3))
        yield name, lambda a=a, b=b, c=c: torch.mm(a, b, out=c)  # type: ignore[misc]
    yield "first weight gradient", _weight_gradient()
    yield SYNCHRONIZE, torch.cuda.synchronize


def _triton(x: torch.Tensor) -> Action:
    """A kernel of Triton that is compiled, but not loaded."""
    from gpu_day import spin

    spin.double.warmup(x, SIZE=1024, grid=(1,))
    return lambda: spin.double[(1,)](x, SIZE=1024)


def _weight_gradient() -> Action:
    """The fused op, which has handles and workspaces of its own."""
    from megatron.zero_bubble.engine.kernels import select

    x, dy = (torch.ones(128, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    grad, ops = torch.zeros(256, 256, device="cuda"), select("cuda").ops
    return lambda: ops.wgrad_accumulate_many([x], [dy], [grad], [])


if __name__ == "__main__":
    sys.exit(main())
