"""Records selected iterations: ``--zero-bubble-trace DIR`` and ``--zero-bubble-record-costs FILE``.

The planned timeline is a simulation of the same order with the measured pass times, so any difference between planned
and measured timeline is runtime overhead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from megatron.core import parallel_state

from megatron.zero_bubble.core.costs import PassMemory, SequenceTokens
from megatron.zero_bubble.core.costs.layers import stages_of_layers
from megatron.zero_bubble.core.costs.lengths import Load, Whole
from megatron.zero_bubble.core.formats.costs import costs_to_json
from megatron.zero_bubble.core.formats.facts import Facts
from megatron.zero_bubble.core.formats.trace import Recording, trace_to_json
from megatron.zero_bubble.core.ir.vocabulary import algorithm_of
from megatron.zero_bubble.core.render.html import render_html
from megatron.zero_bubble.core.render.perfetto import render_perfetto
from megatron.zero_bubble.core.render.svg import draw_comparison
from megatron.zero_bubble.engine.measure.exchanges import with_exchanges
from megatron.zero_bubble.engine.measure.gather import gather_trace, median_costs
from megatron.zero_bubble.engine.measure.layers import gather_layers
from megatron.zero_bubble.engine.measure.recorder import Recorder, UnreadMarks
from megatron.zero_bubble.engine.measure.slice_tokens import gather_least_tokens, gather_overhead
from megatron.zero_bubble.engine.runtime.observer import IterationObserver, IterationStart
from megatron.zero_bubble.integration.adapter.pipeline import Pipeline

# Enough for a median and few enough to keep in memory. The last iterations of a run are past warm-up effects.
LAST_ITERATIONS = 8


def end_of_run(iteration: int, train_iters: int, exit_interval: int | None) -> int:
    """The last iteration of a run that starts at ``iteration``: the next multiple of ``exit_interval``, if given."""
    interval = exit_interval or train_iters
    return min(train_iters, -(-iteration // interval) * interval)


@dataclass(frozen=True)
class Packing:
    """What a job knows of microbatches of packed samples.

    Attributes:
        whole: the sequence that recorded costs are for.
        loads: returns the load of every microbatch of the iteration that begins.
    """

    whole: Whole
    loads: Callable[[], tuple[Load, ...]]


class Tracer(IterationObserver):
    """Records iterations of a run and writes their traces and costs.

    Args:
        recorder: an observer of the same pipeline.
        name: name of the schedule, for titles.
        number: returns the number of the iteration that begins.
        end: maps the number of a run's first iteration to the number of its last.
        iterations: iterations to record; None selects the last ``LAST_ITERATIONS``.
        packing: what the job knows of microbatches of different lengths; None if all are alike.
        facts: returns those of the job, given its GPU, for the costs file.

    Attributes:
        iteration: number of the current or, between iterations, the previous iteration.
    """

    def __init__(
        self,
        recorder: Recorder,
        name: str,
        number: Callable[[], int],
        end: Callable[[int], int],
        iterations: Sequence[range] | None = None,
        packing: Packing | None = None,
        facts: Callable[[str], Facts] = lambda _: {},
    ) -> None:
        self._recorder = recorder
        self._name, self._number, self._end_after = name, number, end
        self._chosen = iterations
        self._end: int | None = None
        self._recording = False
        self._recorded: dict[int, UnreadMarks] = {}
        self._packing, self._facts = packing, facts
        self._loads: dict[int, tuple[Load, ...]] = {}
        self._measured_tokens: int | None = None
        self._chunks: Sequence[torch.nn.Module] = ()
        self.iteration = 0

    @property
    def last(self) -> int:
        """The last iteration to record within the run; the run's last iteration if none of the selected is in it."""
        assert self._end is not None, "set when the first iteration begins"
        end = self._end
        within = (min(some[-1], end) for some in self._ranges(end) if some[0] <= end)
        return max(within, default=end)

    def _ranges(self, end: int) -> Sequence[range]:
        return (range(end - LAST_ITERATIONS + 1, end + 1),) if self._chosen is None else self._chosen

    def begin_iteration(self, start: IterationStart) -> None:
        self.iteration, self._chunks = self._number(), start.chunks
        if self._end is None:
            self._end = self._end_after(self.iteration)
        self._recording = any(self.iteration in some for some in self._ranges(self._end))
        if self._packing is not None:
            loads = self._packing.loads()
            self._measured_tokens = self._measured_tokens or loads[0].tokens
            if self._recording:
                self._loads[self.iteration] = loads
        if self._recording:
            self._recorder.start(start.group)

    def end_iteration(self, completed: bool) -> None:
        """Keep the recording. If Megatron runs an iteration again to check a loss, the later recording replaces it."""
        if self._recording and completed:
            self._recorded[self.iteration] = self._recorder.stop()
        self._recording = False

    def write(self, directory: Path | None, costs_file: Path | None, pipeline: Pipeline | None) -> list[str]:
        """Write the trace, and the costs for ``zero-bubble plan --costs``, on the first rank of the first pipeline.

        A collective call. Files that cannot be written do not raise, so that a finished run does not fail.

        Args:
            pipeline: our pipeline, which has measured the memory of microbatches; None if megatron-core's own ran. For
                costs, the ranks now also measure how short slices may be.

        Returns:
            on the rank that writes, one message per file or folder, including errors; an empty list elsewhere.
        """
        group = parallel_state.get_pipeline_model_parallel_group()
        # Passes of Megatron's interleaved schedule and of its pipeline of one rank cannot be observed.
        recorded = [(iteration, marks) for iteration, marks in self._recorded.items() if marks.passes]
        self._recorded.clear()
        traces = {
            iteration: gather_trace(self._name, marks, group).with_loads(self._loads.get(iteration, ()))
            for iteration, marks in recorded
        }
        memory = self._whole(pipeline.memory.gather(group)) if pipeline is not None and traces else None
        layers: tuple[int, ...] | tuple[str, ...] = ()
        if traces and costs_file:
            placement = next(iter(traces.values())).timeline.schedule.placement
            layers = gather_layers(self._chunks, placement, group)
            layers = layers if stages_of_layers(layers) else ()
        tokens, overhead = None, 0.0
        if pipeline is not None and traces and costs_file:
            schedules = [trace.timeline.schedule for trace in traces.values()]
            # Vocabulary parallelism does not support slices.
            divides = any(algorithm_of(schedule) is not None for schedule in schedules)
            sizes = self._recorder.platform, self._chunks, *pipeline.microbatch, group
            least = None if divides else gather_least_tokens(*sizes)
            if all(schedule.num_slices == 1 for schedule in schedules):  # else the times of slices include it
                overhead = gather_overhead(*sizes)
            tokens = SequenceTokens(pipeline.microbatch[0], least)
        if not _first_of_all():
            return []
        targets = [target for target in (directory, costs_file) if target]
        if not traces:
            return [f"no iteration was recorded, so nothing is written to {target}" for target in targets]
        whole = None if self._packing is None else self._packing.whole
        costs = median_costs([trace.timeline for trace in traces.values()], whole=whole)
        costs = replace(with_exchanges(costs, traces.values()), slice_overhead=overhead)
        recording = Recording(costs, traces, memory, whole and whole.tokens)
        said = []
        for target in targets:
            try:
                if target == directory:
                    _write(recording, target)
                else:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    facts = self._facts(self._recorder.platform.device_name())
                    target.write_text(costs_to_json(costs, memory, tokens, layers, facts), encoding="utf-8")
            except OSError as error:
                said.append(f"cannot write the recorded iterations to {target}: {error.strerror}; they are lost")
            else:
                said.append(f"iterations until {max(traces)} recorded in {target}")
        return said

    def _whole(self, memory: PassMemory) -> PassMemory:
        """The memory of a whole sequence, from that of the first microbatch: in proportion to the tokens."""
        if self._packing is None or not self._measured_tokens:
            return memory
        times = self._packing.whole.tokens / self._measured_tokens
        activation, wgrad = (tuple(size * times for size in sizes) for sizes in (memory.activation, memory.wgrad))
        return replace(memory, activation=activation, wgrad=wgrad)


def _write(recording: Recording, directory: Path) -> None:
    """Write all iterations as JSON, and the typical one as SVG, HTML and Perfetto trace."""
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
