"""The passes of a GPT on one rank, under stock 1F1B and under ours: device time, host time, idle share, memory.

One rank has no bubble, so differences between the rows are the costs of splitting the backward and the gains of fused
weight gradients. Host time per pass is how long Python and the launches of kernels take; a device that computes for
less waits for the host. The idle share is that of one iteration under the profiler, which slows the host.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from torch.profiler import ProfilerActivity, profile

from gpu_day import gpt, step
from gpu_day.predict import FUSED
from megatron.zero_bubble import PassCosts
from megatron.zero_bubble.core.ir import Compute, Op
from megatron.zero_bubble.engine.measure.gather import gather_trace, median_costs
from megatron.zero_bubble.engine.measure.recorder import Recorder
from megatron.zero_bubble.engine.runtime.observer import IterationObserver
from megatron.zero_bubble.integration.patching import observe, revert
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig

STOCK = "stock 1F1B"
# On one rank, ZB-H1 runs every W directly after its B.
VARIANTS: dict[str, ZeroBubbleConfig | None] = {
    STOCK: None,
    "1f1b, ours": ZeroBubbleConfig(schedule="1f1b"),
    "split, exact": ZeroBubbleConfig(schedule="zb-h1", fuse_wgrad=False),
    FUSED: ZeroBubbleConfig(schedule="zb-h1"),
}


def main() -> int:
    """Measure every variant."""
    parser = step.parser(__doc__)
    step.add_sizes(parser)
    options = parser.parse_args()
    job = gpt.Gpt(options)
    rows = [{"variant": name, **measure(job, config, options)} for name, config in VARIANTS.items()]
    step.write(options.output, {**figures(rows), "rows": rows})
    gpt.leave()
    return 0


def figures(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The passes of the fused variant, those of stock, whose backward is whole, and the sum of the first over that of
    the second: above 1, splitting costs time, as it does where the host is the limit.
    """
    of = {row["variant"]: row for row in rows}
    split, stock = of[FUSED]["costs"], of[STOCK]["costs"]
    ours = {key: split[key][0] for key in ("forward_ms", "backward_ms", "wgrad_ms")}
    whole = {f"stock_{key}": stock[key][0] for key in ("forward_ms", "backward_ms")}
    over = sum(ours.values()) / sum(whole.values())
    return {**ours, **whole, "split_over_stock": over, "host_ms": of[FUSED]["host_ms"]}


def measure(
    job: gpt.Gpt, config: ZeroBubbleConfig | None, options: argparse.Namespace, warm: int = 1
) -> dict[str, Any]:
    """Measure one variant, after ``warm`` iterations that allocate memory, compile and record graphs."""
    host = HostClock()
    recorder = Recorder(job.platform)
    observers: list[IterationObserver] = [recorder, host]
    if config is None:
        observe(observers)
    else:
        gpt.under(config, observers)
    try:
        job.platform.reset_peak_memory()
        for _ in range(warm):
            job.iteration()
        busy, idle = _profiled(job, options.device)
        host.clear()
        times, costs = zip(*(_round(job, recorder) for _ in range(options.rounds)), strict=True)
    finally:
        revert()
    return {
        "iteration_ms": median(times),
        "host_ms": host.ms_per_pass(),
        "busy_ms": busy,
        "idle_share": idle,
        "costs": _median(costs),
        "memory": job.memory(),
    }


def _round(job: gpt.Gpt, recorder: Recorder) -> tuple[float, PassCosts]:
    """Time of one iteration in ms, and the times of its passes."""
    recorder.start(job.group)
    job.platform.synchronize()
    start = job.platform.mark()
    job.iteration()
    elapsed = job.platform.elapsed_ms(start, job.platform.mark())
    return elapsed, median_costs([gather_trace("passes", recorder.stop(), job.group).timeline])


def _median(costs: Iterable[PassCosts]) -> dict[str, Any]:
    rounds = [asdict(one) for one in costs]
    keys = ("forward_ms", "backward_ms", "wgrad_ms")
    return {key: [median(stages) for stages in zip(*(one[key] for one in rounds), strict=True)] for key in keys}


def _profiled(job: gpt.Gpt, device: str) -> tuple[float | None, float | None]:
    """How long the device computes in one iteration, in ms, and the share of the iteration, from the first kernel to
    the last, in which it ran none.
    """
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiled:
        job.iteration()
        job.platform.synchronize()
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profiled.events()
        if event.device_type.name == activity.name
    ]
    return busy(spans) / 1e3 or None, idle_share(spans)


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """The time that spans cover."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def idle_share(spans: Sequence[tuple[float, float]]) -> float | None:
    """The share of the time between the first start and the last end that no span covers; None without a span."""
    if not spans:
        return None  # the profiler cannot see the device, which must not cost the other figures
    whole = max(end for _, end in spans) - min(start for start, _ in spans)
    return 1.0 - busy(spans) / whole if whole > 0 else 0.0


class HostClock(IterationObserver):
    """Sums the host's time within passes."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.clear()

    def clear(self) -> None:
        """Forget all passes."""
        self._seconds, self._count, self._begun = 0.0, 0, 0.0

    def begin(self, op: Op) -> None:
        self._begun = self._clock()

    def end(self, op: Op) -> None:
        if isinstance(op, Compute):
            self._seconds += self._clock() - self._begun
            self._count += 1

    def ms_per_pass(self) -> float:
        """The mean over all passes since ``clear``."""
        return 1e3 * self._seconds / self._count


if __name__ == "__main__":
    sys.exit(main())
