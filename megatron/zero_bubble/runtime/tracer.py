"""Chosen iterations as they ran: ``--zero-bubble-trace DIR`` and ``--zero-bubble-record-costs FILE``.

The planned timeline is the simulation of the same order at the measured pass times, so the two differ only by what
the runtime adds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron.core import parallel_state

from megatron.zero_bubble.costs import costs_to_json
from megatron.zero_bubble.render.html import render_html
from megatron.zero_bubble.render.perfetto import render_perfetto
from megatron.zero_bubble.render.svg import render_svg
from megatron.zero_bubble.runtime.measure import gather_trace, median_costs
from megatron.zero_bubble.runtime.pipeline import Pipeline
from megatron.zero_bubble.runtime.recorder import Marks, Recorder
from megatron.zero_bubble.trace_file import Recording, trace_to_json

# Enough for a median, few enough to keep in memory; the end of a run is warm.
LAST_ITERATIONS = 8


class Tracer:
    """Records iterations of a run and writes what they were like.

    Args:
        recorder: what runs the passes has it too.
        name: of the schedule, for titles.
        train_iters: when the run is to end.
        iterations: those to record; None for the last ``LAST_ITERATIONS``.
        may_end_early: whether the run may end before ``train_iters``; then, where none are chosen, all iterations are
            recorded, and the last ones are kept.
    """

    def __init__(
        self,
        recorder: Recorder,
        name: str,
        train_iters: int,
        iterations: Sequence[range] | None = None,
        may_end_early: bool = False,
    ) -> None:
        self.recorder = recorder
        self._name, self._end = name, train_iters
        first = 1 if may_end_early else train_iters - LAST_ITERATIONS + 1
        self._chosen = (range(first, train_iters + 1),) if iterations is None else iterations
        self._recorded: deque[tuple[int, Marks]] = deque(maxlen=LAST_ITERATIONS if iterations is None else None)

    @property
    def last(self) -> int:
        """The last iteration to record, of those that the run has; where it has none, its last."""
        within = (min(some[-1], self._end) for some in self._chosen if some[0] <= self._end)
        return max(within, default=self._end)

    def around_passes(self, iteration: int, passes: Callable[[], Any]) -> Any:
        """Run the passes of an iteration, recorded if it is a chosen one."""
        if not any(iteration in some for some in self._chosen):
            return passes()
        self.recorder.start(parallel_state.get_pipeline_model_parallel_group())
        result = passes()
        self._recorded.append((iteration, self.recorder.stop()))
        return result

    def write(self, directory: Path | None, costs_file: Path | None, pipeline: Pipeline | None) -> None:
        """Write the trace, and the costs as ``zero-bubble plan --costs`` reads them, from the first rank of the first
        pipeline; nothing where no iteration was recorded. A collective call.

        Args:
            pipeline: ours, which has counted what microbatches keep; None where megatron-core's own ran.
        """
        group = parallel_state.get_pipeline_model_parallel_group()
        # Megatron's interleaved schedule and its pipeline of one rank tell of no passes.
        recorded = [(iteration, marks) for iteration, marks in self._recorded if marks.passes]
        traces = {iteration: gather_trace(self._name, marks, group) for iteration, marks in recorded}
        memory = pipeline.gather_memory(group) if pipeline is not None and traces else None
        if not _first_of_all():
            return
        if not traces:
            for target in filter(None, (directory, costs_file)):
                print(f"zero-bubble: no iteration was recorded, so nothing is written to {target}", flush=True)
            return
        costs = median_costs([trace.timeline for trace in traces.values()])
        if directory is not None:
            _write(Recording(costs, traces, memory), directory)
        if costs_file is not None:
            costs_file.parent.mkdir(parents=True, exist_ok=True)
            costs_file.write_text(costs_to_json(costs, memory), encoding="utf-8")


def _write(recording: Recording, directory: Path) -> None:
    """All iterations as data, the typical one as pictures."""
    typical = recording.compared(recording.typical)
    files = {
        "trace.json": trace_to_json(recording),
        "timeline.svg": render_svg(typical.planned, typical.measured.timeline, titles=("planned", "measured")),
        "timeline.html": render_html(typical),
        "perfetto.json": render_perfetto(typical),
    }
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")


def _first_of_all() -> bool:
    return (
        parallel_state.get_pipeline_model_parallel_rank() == 0
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_data_parallel_rank() == 0
    )
