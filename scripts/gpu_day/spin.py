"""How much passes slow down next to a kernel that occupies some multiprocessors, as a waiting receive of NCCL does.

A receive that is posted before its message arrives is a kernel whose blocks spin. Our spinning kernel has N blocks;
each block takes all registers of a multiprocessor (1024 threads with 64 registers; a block of NCCL has 640 threads with
up to 96, but Triton takes powers of two only), so no other kernel runs there. The kernel ends when the passes have set
a flag, or at a time limit, which makes the measurement invalid.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from types import TracebackType
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from gpu_day import gpt, step
from megatron.zero_bubble.engine.measure.gather import gather_trace, median_costs
from megatron.zero_bubble.engine.measure.recorder import Recorder
from megatron.zero_bubble.integration.patching import revert
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig

NUM_WARPS = 32
HELD = 1024 * 32
"""Values that the threads of a block hold while they spin: 32 registers each, with which the kernel takes 64."""
LIMIT_NS = 3_000_000_000
"""Longer than the passes of one iteration, and short, because every measurement that fails costs as much."""
PASSES = ("forward_ms", "backward_ms", "wgrad_ms")


@triton.jit
def spin(flag, ended, values, limit_ns, HELD: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201, N803
    """Hold values in registers until ``flag`` is set; ``ended`` then has a 1 per block, or a 0 after the limit."""
    places = tl.arange(0, HELD)
    held = tl.load(values + places, volatile=True)
    began = cuda.globaltimer()
    stop = tl.load(flag, volatile=True)
    while (stop == 0) & (cuda.globaltimer() - began < limit_ns):
        stop = tl.load(flag, volatile=True)
    tl.store(ended + tl.program_id(0), stop)
    tl.store(values + places, held)


@triton.jit
def double(values, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201, N803
    """Double ``SIZE`` values: a small kernel for ``host_waits``."""
    places = tl.arange(0, SIZE)
    tl.store(values + places, 2 * tl.load(values + places))


class Spinner(AbstractContextManager["Spinner"]):
    """Runs the kernel with ``num_blocks`` blocks from the beginning of the context until the work queued in it is done.

    Raises:
        RuntimeError: at the end of the context, if blocks reached the time limit.
    """

    def __init__(self, num_blocks: int, limit_ns: int = LIMIT_NS) -> None:
        self.num_blocks = num_blocks
        self._limit_ns = limit_ns
        self._flag = torch.zeros(1, dtype=torch.int32, device="cuda")
        self._ended = torch.zeros(num_blocks, dtype=torch.int32, device="cuda")
        self._values = torch.zeros(HELD, device="cuda")
        self._stream = torch.cuda.Stream(priority=-1)  # NCCL's streams can have a high priority as well
        self._flag.fill_(1)
        self._launch()  # compiles; afterwards no kernel has to be loaded while blocks spin, which could wait for them
        self.stop()

    def start(self) -> None:
        """Let the blocks spin, when the device has done everything before."""
        torch.cuda.synchronize()
        self._launch()

    def _launch(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            spin[(self.num_blocks,)](
                self._flag, self._ended, self._values, self._limit_ns, HELD=HELD, num_warps=NUM_WARPS
            )

    def stop(self) -> int:
        """Set the flag after what is queued on the current stream; return the number of blocks that saw it in time."""
        self._flag.fill_(1)
        torch.cuda.synchronize()
        stopped = int(self._ended.sum())
        self._flag.zero_()
        self._ended.zero_()
        return stopped

    def __enter__(self) -> Spinner:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stopped = self.stop()
        if kind is None and stopped != self.num_blocks:
            raise RuntimeError(f"{self.num_blocks - stopped} of {self.num_blocks} blocks ended at the time limit")


def main() -> int:
    """Measure the passes next to every number of blocks; on the CPU, the numbers have no effect."""
    parser = step.parser(__doc__)
    step.add_sizes(parser)
    parser.add_argument("--num-blocks", type=int, nargs="+", required=True)
    options = parser.parse_args()
    job = gpt.Gpt(options)
    recorder = Recorder(job.platform)
    gpt.under(ZeroBubbleConfig(schedule="zb-h1"), [recorder])  # on one rank, every W runs directly after its B
    try:
        job.iteration()
        rows = [{"blocks": number, **_measure(job, recorder, number, options)} for number in options.num_blocks]
    finally:
        revert()
    figures: dict[str, Any] = {
        f"{name.removesuffix('_ms')}_over_free": rows[-1][name] / rows[0][name] for name in PASSES
    }
    step.write(options.output, {**figures, "most": rows[-1]["blocks"], "rows": rows})
    gpt.leave()
    return 0


def _measure(job: gpt.Gpt, recorder: Recorder, num_blocks: int, options: argparse.Namespace) -> dict[str, float]:
    """Median times of the passes in ms."""
    spinner = Spinner(num_blocks) if num_blocks and options.device == "cuda" else nullcontext()
    rounds = []
    for _ in range(options.rounds):
        recorder.start(job.group)  # waits for the device, so before the blocks spin
        with spinner:
            job.iteration()
        rounds.append(median_costs([gather_trace("spin", recorder.stop(), job.group).timeline]))
    return {name: median(getattr(costs, name)[0] for costs in rounds) for name in PASSES}


if __name__ == "__main__":
    sys.exit(main())
