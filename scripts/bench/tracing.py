"""Recorded iterations: compare the bubble in the trace with that of the wall clock, and measure the recording overhead.

Passes sleep, and real tensors go over gloo, as in ``emulated_compute.py --clock wall``. Every round runs one iteration
of each schedule with and one without recording. The wall clock's bubble is that of the recorded iterations: the time
between the common start of the ranks and the end of the last rank that the passes of the busiest rank do not fill.

    bash scripts/bench.sh tracing [--num-ranks 8] [--num-microbatches 16] [--pass-ms 50]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import page, ranks
from bench.emulated_compute import OURS, timed

if TYPE_CHECKING:
    from megatron.zero_bubble.core.analysis.timeline import Timeline

RECORDED = ", recorded"


def main() -> int:
    """Start the ranks, or run as one of them."""
    options = _parse()
    if not ranks.on_ranks():
        ranks.launch("tracing", options.num_ranks, sys.argv[1:])
        return 0
    import torch.distributed as dist

    from megatron.zero_bubble.engine.platforms import select

    select("cpu").setup(0)
    dist.init_process_group("gloo")
    rows = _measure(options)
    if ranks.is_first():
        settings = {key: getattr(options, key) for key in ("num_ranks", "num_microbatches", "pass_ms", "kib", "rounds")}
        page.report("tracing", settings | {"schedules": rows}, options.output)
    ranks.leave()
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=OURS, default=OURS, help="schedules to run")
    parser.add_argument("--rounds", type=int, default=5, help="number of measured rounds")
    parser.add_argument("--num-ranks", type=int, default=8)
    parser.add_argument("--num-microbatches", type=int, default=16)
    parser.add_argument("--pass-ms", type=float, default=50.0, help="time of each of F, B and W on a rank")
    parser.add_argument("--kib", type=int, default=256, help="size of every message in KiB")
    parser.add_argument("--output", type=Path, default=Path("runs/bench/tracing.json"))
    return parser.parse_args()


class _Variant:
    """One schedule with passes that sleep, recorded or not."""

    def __init__(self, name: str, options: argparse.Namespace, transport: Any) -> None:
        import torch.distributed as dist

        from megatron.zero_bubble import PassCosts, build
        from megatron.zero_bubble.core.plan import lower
        from megatron.zero_bubble.engine.measure.recorder import Recorder, UnreadMarks
        from megatron.zero_bubble.engine.platforms import select
        from tests.helpers.emulate.stages import SleepingStage

        schedule = build(name, num_ranks=options.num_ranks, num_microbatches=options.num_microbatches)
        costs = PassCosts.uniform(schedule.placement, *[options.pass_ms] * 3)
        self._name, self._plan, self._transport = name, lower(schedule), transport
        self._stage = SleepingStage(schedule, costs, (options.kib * 1024 // 4,))
        self._recorder, self._marks = Recorder(select("cpu")), list[UnreadMarks]()
        self._group = dist.group.WORLD
        transport.open(self._plan.channels)

    def plain(self) -> None:
        """Run one iteration."""
        from tests.helpers.emulate.execute import execute

        execute(self._plan, self._stage, self._transport)

    def start(self) -> None:
        """Start recording; this synchronizes the ranks, as the iteration's first messages would do otherwise."""
        assert self._group is not None
        self._recorder.start(self._group)

    def recorded(self) -> None:
        """Run the same iteration, recorded."""
        from tests.helpers.emulate.execute import execute

        execute(self._plan, self._stage, self._transport, observer=self._recorder)
        self._marks.append(self._recorder.stop())

    def gather(self, rounds: int) -> list[Timeline]:
        """The last ``rounds`` recorded iterations; a collective call."""
        from megatron.zero_bubble.engine.measure.gather import gather_trace

        assert self._group is not None
        return [gather_trace(self._name, marks, self._group).timeline for marks in self._marks[-rounds:]]


def _measure(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    import torch.distributed as dist

    from megatron.zero_bubble.engine.runtime.groups import Directions
    from megatron.zero_bubble.engine.runtime.transport import Transport

    assert dist.group.WORLD is not None
    transport = Transport(Directions.of(dist.group.WORLD), ())
    variants = {name: _Variant(name, options, transport) for name in options.only}
    runs = {name: timed(variant.plain) for name, variant in variants.items()}
    runs |= {name + RECORDED: timed(variant.recorded, variant.start) for name, variant in variants.items()}
    times = ranks.interleaved(runs, options.rounds)
    return {
        name: _row(times[name], times[name + RECORDED], variant.gather(options.rounds))
        for name, variant in variants.items()
    }


def _row(plain: list[float], recorded: list[float], timelines: list[Timeline]) -> dict[str, Any]:
    wall = [(ms - timeline.work_ms) / ms for ms, timeline in zip(recorded, timelines, strict=True)]
    trace = [timeline.bubble_rate("makespan") for timeline in timelines]
    return {
        "wall_bubbles": wall,
        "trace_bubbles": trace,
        "overheads": [on / off - 1 for on, off in zip(recorded, plain, strict=True)],
        "apart": max(abs(a - b) for a, b in zip(wall, trace, strict=True)),
    }


if __name__ == "__main__":
    sys.exit(main())
