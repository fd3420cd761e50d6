"""The last iterations as they ran: ``--zero-bubble-trace DIR`` and ``--zero-bubble-record-costs FILE``.

The planned timeline is the simulation of the same schedule at the measured pass times, so the two differ only by what
the runtime adds. DIR gets ``timeline.svg`` (planned above measured) and ``trace.json``.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from megatron.core import parallel_state

from megatron.zero_bubble.analysis.simulate import simulate
from megatron.zero_bubble.analysis.timeline import Timeline
from megatron.zero_bubble.costs import PassCosts, costs_to_json
from megatron.zero_bubble.platforms import Platform
from megatron.zero_bubble.render.svg import render_svg
from megatron.zero_bubble.runtime.measure import gather_trace, median_costs
from megatron.zero_bubble.runtime.pipeline import Pipeline
from megatron.zero_bubble.runtime.recorder import Recorder

# Enough for a median, few enough to keep in memory; the end of a run is warm.
LAST_ITERATIONS = 8


class Tracer:
    """Records the last iterations of a run and writes what they were like.

    Args:
        name: of the schedule, for titles.
        train_iters: when the run is to end.
        may_end_early: whether it may end before; then every iteration is recorded, and the last ones are kept.
    """

    def __init__(self, platform: Platform, name: str, train_iters: int, may_end_early: bool = False) -> None:
        self.recorder = Recorder(platform)
        self._name = name
        self._first = 1 if may_end_early else train_iters - LAST_ITERATIONS + 1
        self._timelines: deque[Timeline] = deque(maxlen=LAST_ITERATIONS)

    def around_passes(self, iteration: int, passes: Callable[[], Any]) -> Any:
        """Run the passes of an iteration, recorded if it may be one of the last."""
        if iteration < self._first:
            return passes()
        group = parallel_state.get_pipeline_model_parallel_group()
        self.recorder.start(group)
        result = passes()
        self._timelines.append(gather_trace(self._name, self.recorder.stop(), group).timeline)
        return result

    def write(self, directory: Path) -> None:
        """Write timelines, from the first rank of the first pipeline; nothing where no iteration was recorded."""
        if not _first_of_all():
            return
        if not self._timelines:
            print(f"zero-bubble: no iteration was recorded, so nothing is written to {directory}", flush=True)
            return
        costs = median_costs(list(self._timelines))
        measured = sorted(self._timelines, key=lambda timeline: timeline.makespan_ms)[len(self._timelines) // 2]
        planned = simulate(measured.schedule, costs)
        directory.mkdir(parents=True, exist_ok=True)
        drawing = render_svg(planned, measured, titles=("planned", "measured"))
        (directory / "timeline.svg").write_text(drawing, encoding="utf-8")
        text = json.dumps(_summary(self._name, costs, planned, list(self._timelines)), indent=1)
        (directory / "trace.json").write_text(text + "\n", encoding="utf-8")

    def write_costs(self, file: Path, pipeline: Pipeline) -> None:
        """Write the measured costs as ``zero-bubble plan --costs`` reads them; a collective call."""
        if not self._timelines:
            if _first_of_all():
                print(f"zero-bubble: no iteration was recorded, so nothing is written to {file}", flush=True)
            return
        memory = pipeline.gather_memory(parallel_state.get_pipeline_model_parallel_group())
        if not _first_of_all():
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(costs_to_json(median_costs(list(self._timelines)), memory), encoding="utf-8")


def _first_of_all() -> bool:
    return (
        parallel_state.get_pipeline_model_parallel_rank() == 0
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_data_parallel_rank() == 0
    )


def _summary(name: str, costs: PassCosts, planned: Timeline, measured: list[Timeline]) -> dict[str, Any]:
    """Bubble rates of both kinds, planned and (median of the iterations) measured; times in ms."""
    return {
        "schedule": name,
        "num_ranks": planned.schedule.num_ranks,
        "num_microbatches": planned.schedule.num_microbatches,
        "iterations": len(measured),
        "forward_ms": costs.forward_ms,
        "backward_ms": costs.backward_ms,
        "wgrad_ms": costs.wgrad_ms,
        "comm_ms": costs.comm_ms,
        "planned": _figures([planned]),
        "measured": _figures(measured),
        "spans": [[[str(p), start, end] for p, start, end in row] for row in measured[-1].spans],
    }


def _figures(timelines: list[Timeline]) -> dict[str, float]:
    return {
        "makespan_ms": median(t.makespan_ms for t in timelines),
        "span_ms": median(t.span_ms for t in timelines),
        "bubble_rate_makespan": median(t.bubble_rate("makespan") for t in timelines),
        "bubble_rate_span": median(t.bubble_rate("span") for t in timelines),
    }
