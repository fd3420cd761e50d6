"""Chosen iterations as they ran: ``--zero-bubble-trace DIR`` and ``--zero-bubble-record-costs FILE``.

The planned timeline is the simulation of the same order at the measured pass times, so the two differ only by what
the runtime adds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from megatron.core import parallel_state

from megatron.zero_bubble.adapter.pipeline import Pipeline
from megatron.zero_bubble.formats.costs import costs_to_json
from megatron.zero_bubble.formats.trace import Recording, trace_to_json
from megatron.zero_bubble.measure.gather import gather_trace, median_costs
from megatron.zero_bubble.measure.recorder import Marks, Recorder
from megatron.zero_bubble.render.html import render_html
from megatron.zero_bubble.render.perfetto import render_perfetto
from megatron.zero_bubble.render.svg import draw_comparison
from megatron.zero_bubble.runtime.observer import IterationObserver, IterationStart

# Enough for a median, few enough to keep in memory; the end of a run is warm.
LAST_ITERATIONS = 8


def end_of_run(iteration: int, train_iters: int, exit_interval: int | None) -> int:
    """The last iteration of a run that begins with ``iteration``: a multiple of ``exit_interval``, if there is one."""
    interval = exit_interval or train_iters
    return min(train_iters, -(-iteration // interval) * interval)


class Tracer(IterationObserver):
    """Records iterations of a run and writes what they were like.

    Args:
        recorder: an observer of the same pipeline.
        name: of the schedule, for titles.
        number: the number of the iteration that begins.
        end: from the number of a run's first iteration to that of its last.
        iterations: those to record; None for the last ``LAST_ITERATIONS``.

    Attributes:
        iteration: the number of the one under way, or of the last.
    """

    def __init__(
        self,
        recorder: Recorder,
        name: str,
        number: Callable[[], int],
        end: Callable[[int], int],
        iterations: Sequence[range] | None = None,
    ) -> None:
        self._recorder = recorder
        self._name, self._number, self._end_after = name, number, end
        self._chosen = iterations
        self._end: int | None = None
        self._recording = False
        self._recorded: dict[int, Marks] = {}
        self.iteration = 0

    @property
    def last(self) -> int:
        """The last iteration to record, of those that the run has; where it has none, its last."""
        assert self._end is not None, "known from the first iteration on"
        end = self._end
        within = (min(some[-1], end) for some in self._ranges(end) if some[0] <= end)
        return max(within, default=end)

    def _ranges(self, end: int) -> Sequence[range]:
        return (range(end - LAST_ITERATIONS + 1, end + 1),) if self._chosen is None else self._chosen

    def begin_iteration(self, start: IterationStart) -> None:
        self.iteration = self._number()
        if self._end is None:
            self._end = self._end_after(self.iteration)
        self._recording = any(self.iteration in some for some in self._ranges(self._end))
        if self._recording:
            self._recorder.start(start.group)

    def end_iteration(self, completed: bool) -> None:
        """One that is run again, as Megatron does where it doubts a loss, replaces what was recorded of it."""
        if self._recording and completed:
            self._recorded[self.iteration] = self._recorder.stop()
        self._recording = False

    def write(self, directory: Path | None, costs_file: Path | None, pipeline: Pipeline | None) -> list[str]:
        """Write the trace, and the costs as ``zero-bubble plan --costs`` reads them, from the first rank of the first
        pipeline. A collective call. The run is worth more than its trace: what cannot be written is said, not raised.

        Args:
            pipeline: ours, which has counted what microbatches keep; None where megatron-core's own ran.

        Returns:
            a sentence for each of the two, on the rank that writes.
        """
        group = parallel_state.get_pipeline_model_parallel_group()
        # Megatron's interleaved schedule and its pipeline of one rank tell of no passes.
        recorded = [(iteration, marks) for iteration, marks in self._recorded.items() if marks.passes]
        self._recorded.clear()
        traces = {iteration: gather_trace(self._name, marks, group) for iteration, marks in recorded}
        memory = pipeline.memory.gather(group) if pipeline is not None and traces else None
        if not _first_of_all():
            return []
        targets = [target for target in (directory, costs_file) if target]
        if not traces:
            return [f"no iteration was recorded, so nothing is written to {target}" for target in targets]
        costs = median_costs([trace.timeline for trace in traces.values()])
        said = []
        for target in targets:
            try:
                if target == directory:
                    _write(Recording(costs, traces, memory), target)
                else:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_text(costs_to_json(costs, memory), encoding="utf-8")
            except OSError as error:
                said.append(f"cannot write what was recorded to {target}: {error.strerror}; it is lost")
            else:
                said.append(f"iterations until {max(traces)} recorded in {target}")
        return said


def _write(recording: Recording, directory: Path) -> None:
    """All iterations as data, the typical one as pictures."""
    typical = recording.compared(recording.typical)
    files = {
        "trace.json": trace_to_json(recording),
        "timeline.svg": draw_comparison(typical),
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
        and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    )
