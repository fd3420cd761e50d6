"""Recorded iterations against the wall clock: is the bubble of the trace the real one, and what does recording cost?

Passes that sleep, real tensors on gloo (as ``emulated_compute.py --clock wall``). Every round runs an iteration of each
schedule with and without recording. The wall clock's bubble is of the recorded iterations: all that the passes of the
busiest rank do not fill, from the start that the ranks share to the end of the last one.

    bash scripts/bench.sh tracing [--num-ranks 8] [--num-microbatches 16] [--pass-ms 50] [--trace DIR]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from bench import ranks
from bench.emulated_compute import OURS, timed

RECORDED = ", recorded"


def main() -> int:
    """Start the ranks, or be one of them."""
    options = _parse()
    if not ranks.on_ranks():
        ranks.launch("tracing", options.num_ranks, sys.argv[1:])
        return 0
    import torch.distributed as dist

    from megatron.zero_bubble.platforms import select

    select("cpu").setup(0)
    dist.init_process_group("gloo")
    rows = _measure(options)
    if dist.get_rank() == 0:
        _print(options, rows)
        content = {"bench": "tracing", "machine": ranks.machine(), "load_average": os.getloadavg()}
        settings = {key: getattr(options, key) for key in ("num_ranks", "num_microbatches", "pass_ms", "kib", "rounds")}
        ranks.write(options.output, content | settings | {"schedules": rows})
    dist.destroy_process_group()
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=OURS, default=OURS, help="these schedules")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds")
    parser.add_argument("--num-ranks", type=int, default=8)
    parser.add_argument("--num-microbatches", type=int, default=16)
    parser.add_argument("--pass-ms", type=float, default=50.0, help="of F, B and W of a rank each")
    parser.add_argument("--kib", type=int, default=256, help="size of every message")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="keep the recorded iterations as DIR/SCHEDULE.json")
    parser.add_argument("--output", type=Path, default=Path("runs/bench/tracing.json"))
    return parser.parse_args()


class _Variant:
    """One schedule with passes that sleep, recorded or not."""

    def __init__(self, name: str, options: argparse.Namespace, transport: Any) -> None:
        import torch
        import torch.distributed as dist

        from megatron.zero_bubble import PassCosts, build
        from megatron.zero_bubble.emulate.stages import SleepingStage
        from megatron.zero_bubble.measure.recorder import Marks, Recorder
        from megatron.zero_bubble.plan import lower
        from megatron.zero_bubble.platforms import select

        self.schedule = build(name, num_ranks=options.num_ranks, num_microbatches=options.num_microbatches)
        self.costs = PassCosts.uniform(self.schedule.placement, *[options.pass_ms] * 3)
        self._plan, self._transport = lower(self.schedule), transport
        self._like = torch.zeros(options.kib * 1024 // 4)
        self._stage = SleepingStage(self.schedule, self.costs, tuple(self._like.shape))
        self._recorder, self._marks = Recorder(select("cpu")), list[Marks]()
        self.start_ms: list[float] = []
        self._group = dist.group.WORLD
        transport.open(self._plan.channels)

    def plain(self) -> None:
        """An iteration."""
        from megatron.zero_bubble.emulate.execute import execute

        execute(self._plan, self._stage, self._transport, self._like)

    def start(self) -> None:
        """Begin to record: the ranks meet, which they would do in the iteration's first messages."""
        assert self._group is not None
        started = time.perf_counter()
        self._recorder.start(self._group)
        self.start_ms.append((time.perf_counter() - started) * 1e3)

    def recorded(self) -> None:
        """The same iteration, recorded."""
        from megatron.zero_bubble.emulate.execute import execute

        execute(self._plan, self._stage, self._transport, self._like, observer=self._recorder)
        self._marks.append(self._recorder.stop())

    def gather(self, rounds: int) -> Any:
        """The last ``rounds`` recorded iterations; a collective call."""
        from megatron.zero_bubble.formats.trace import Recording
        from megatron.zero_bubble.measure.gather import gather_trace

        assert self._group is not None
        traces = [gather_trace(self.schedule.name, marks, self._group) for marks in self._marks[-rounds:]]
        return Recording(self.costs, dict(enumerate(traces, start=1)))


def _measure(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    import torch.distributed as dist

    from megatron.zero_bubble.formats.trace import trace_to_json
    from megatron.zero_bubble.runtime.transport import Transport

    assert dist.group.WORLD is not None
    transport = Transport(dist.group.WORLD, ())
    variants = {name: _Variant(name, options, transport) for name in options.only}
    runs = {name: timed(variant.plain) for name, variant in variants.items()}
    runs |= {name + RECORDED: timed(variant.recorded, variant.start) for name, variant in variants.items()}
    times = ranks.interleaved(runs, options.rounds)
    rows = {}
    for name, variant in variants.items():
        recording = variant.gather(options.rounds)
        rows[name] = _row(times[name], times[name + RECORDED], recording)
        rows[name]["start_ms"] = median(variant.start_ms)
        if options.trace is not None and dist.get_rank() == 0:
            options.trace.mkdir(parents=True, exist_ok=True)
            (options.trace / f"{name}.json").write_text(trace_to_json(recording), encoding="utf-8")
    return rows


def _row(plain: list[float], recorded: list[float], recording: Any) -> dict[str, Any]:
    comparisons = [recording.compared(number) for number in recording.traces]
    measured = [c.measured.timeline for c in comparisons]
    wall = [(ms - timeline.work_ms) / ms for ms, timeline in zip(recorded, measured, strict=True)]
    trace = [timeline.bubble_rate("makespan") for timeline in measured]
    return {
        "planned_ms": comparisons[0].planned.makespan_ms,
        "plain_ms": median(plain),
        "recorded_ms": median(recorded),
        "overhead": median(on / off - 1 for on, off in zip(recorded, plain, strict=True)),
        "wall_bubble": median(wall),
        "trace_bubble": median(trace),
        "wall_bubbles": wall,
        "trace_bubbles": trace,
        "overheads": [on / off - 1 for on, off in zip(recorded, plain, strict=True)],
        "apart": max(abs(a - b) for a, b in zip(wall, trace, strict=True)),
        "slow_ms": median(c.difference.slow_ms for c in comparisons),
        "transfer_ms": median(c.difference.transfer_ms for c in comparisons),
        "host_ms": median(c.difference.host_ms for c in comparisons),
        "slack_ms": median(c.difference.slack_ms for c in comparisons),
        "spread": ranks.spread(plain) if len(plain) > 1 else 0.0,
    }


_COLUMNS = (
    ("planned_ms", "{:.1f}", "planned ms"),
    ("plain_ms", "{:.1f}", "not recorded ms"),
    ("recorded_ms", "{:.1f}", "recorded ms"),
    ("overhead", "{:+.2%}", "recording"),
    ("start_ms", "{:.2f}", "meeting ms"),
    ("wall_bubble", "{:.2%}", "bubble: wall"),
    ("trace_bubble", "{:.2%}", "trace"),
    ("apart", "{:.2%}", "apart at most"),
)
_CAUSES = ("slow_ms", "transfer_ms", "host_ms", "slack_ms")


def _print(options: argparse.Namespace, rows: dict[str, dict[str, Any]]) -> None:
    print(
        f"\nP={options.num_ranks}, M={options.num_microbatches}, {options.pass_ms:g} ms of F, B and W a rank, "
        f"{options.kib} KiB a message, medians of {options.rounds} rounds, load average {os.getloadavg()[0]:.1f}"
    )
    print(f"  {'schedule':<17}" + "".join(f"   {title}" for _, _, title in _COLUMNS))
    for name, row in rows.items():
        print(f"  {name:<17}" + "".join(f"   {form.format(row[key]):>{len(title)}}" for key, form, title in _COLUMNS))
    print("  recorded minus planned along the critical chain: slow passes, transfers, host gaps, slack, in ms")
    for name, row in rows.items():
        print(f"  {name:<17}" + "".join(f"   {row[key]:+10.1f}" for key in _CAUSES))


if __name__ == "__main__":
    sys.exit(main())
