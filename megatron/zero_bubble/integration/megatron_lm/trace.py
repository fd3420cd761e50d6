"""``--zero-bubble-trace`` and ``--zero-bubble-record-costs`` in a Megatron-LM job, whose training loop is Megatron's.

Iterations have Megatron's numbers. The files are written right after the passes of the last recorded iteration, when
all ranks are at the same point. Rank 0 writes them, so only rank 0 can detect that a folder is not writable.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.facts import Facts
from megatron.zero_bubble.core.formats.files import make_writable
from megatron.zero_bubble.engine.measure.recorder import Recorder
from megatron.zero_bubble.engine.platforms import select
from megatron.zero_bubble.engine.runtime.observer import IterationStart
from megatron.zero_bubble.integration.adapter.pipeline import Pipeline
from megatron.zero_bubble.integration.adapter.tracer import Tracer, end_of_run
from megatron.zero_bubble.planning.job.facts import facts_of, gpu_kind
from megatron.zero_bubble.planning.job.rules import check_costs_file
from megatron.zero_bubble.planning.run_options import RunOptions


class JobTrace(Tracer):
    """Record the iterations that the flags of a job select.

    Args:
        run: what our flags ask for.
        args: the job's validated arguments, read during training, because Megatron sets their iteration count late.
        say: prints which files were written, or why none were, on rank 0.

    Attributes:
        pipeline: the pipeline that runs the iterations.
    """

    pipeline: Pipeline

    def __init__(self, run: RunOptions, args: Any, say: Callable[[str], None]) -> None:
        self.recorder = Recorder(select("auto"))
        name, asked = run.setup.name, run.observations
        ends = self._number_of_next, self._end_of_run
        super().__init__(self.recorder, name, *ends, asked.trace_iterations, facts=self._facts_on)
        self._run, self._args, self._say = run, args, say
        self._directory, self._costs_file = (
            Path(path).resolve() if path else None for path in (asked.trace, asked.record_costs)
        )
        self._has_begun = False
        self._is_written = False

    def _number_of_next(self) -> int:
        return int(self._args.curr_iteration) + 1

    def _end_of_run(self, first: int) -> int:
        return end_of_run(first, self._args.train_iters, getattr(self._args, "exit_interval", None))

    def _facts_on(self, gpu: str) -> Facts:
        return facts_of(self._args, gpu_kind(gpu))

    def make_folders(self) -> None:
        """Create the output folders before training, so that a bad path fails at start-up.

        Raises:
            UserError: a folder is not writable.
        """
        check_costs_file(self._run)
        for folder in filter(None, (self._directory, self._costs_file and self._costs_file.parent)):
            try:
                make_writable(folder)
            except OSError as error:
                raise UserError(f"cannot write to the folder {folder}: {error.strerror}; give another path") from None

    def begin_iteration(self, start: IterationStart) -> None:
        super().begin_iteration(start)
        if not self._has_begun:
            self._has_begun = True
            atexit.register(self._check)

    def end_iteration(self, completed: bool) -> None:
        """Write the files after the last iteration to record."""
        super().end_iteration(completed)
        if completed and self.iteration >= self.last and not self._is_written:
            self._is_written = True
            atexit.unregister(self._check)
            for sentence in self.write(self._directory, self._costs_file, self.pipeline):
                self._say(sentence)

    def _check(self) -> None:
        """Report at exit, through ``atexit``, that no files were written."""
        if self._has_begun and not self._is_written:
            self._say(f"the job ended before iteration {self.last}, the last to record, so no trace was written")
