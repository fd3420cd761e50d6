"""``--zero-bubble-trace`` and ``--zero-bubble-record-costs`` in a Megatron-LM job, whose loop and end are its own.

Iterations are numbered as Megatron numbers them. The files are written right after the passes of the last one that is
recorded, while all ranks are at the same place. Rank 0 writes them, so it alone knows whether it can.
"""

from __future__ import annotations

import argparse
import atexit
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.zero_bubble.adapter.pipeline import Pipeline
from megatron.zero_bubble.adapter.tracer import Tracer, end_of_run
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.formats.files import make_writable
from megatron.zero_bubble.job.rules import check_costs_file
from megatron.zero_bubble.measure.recorder import Recorder
from megatron.zero_bubble.platforms import select
from megatron.zero_bubble.runtime.observer import IterationStart


class JobTrace(Tracer):
    """Records the iterations of a job that its flags choose.

    Args:
        options: our flags.
        args: the job's, validated; read when it trains, because it counts its iterations late.
        say: where it says that it has written, or could not, on rank 0.

    Attributes:
        pipeline: what runs the iterations.
    """

    pipeline: Pipeline

    def __init__(self, options: argparse.Namespace, args: Any, say: Callable[[str], None]) -> None:
        self.recorder = Recorder(select("auto"))
        name = options.zero_bubble_schedule or options.zero_bubble_schedule_file
        super().__init__(
            self.recorder, name, self._number_of_next, self._end_of_run, options.zero_bubble_trace_iterations
        )
        self._options, self._args, self._say = options, args, say
        self._directory, self._costs_file = (
            Path(path).resolve() if path else None
            for path in (options.zero_bubble_trace, options.zero_bubble_record_costs)
        )
        self._has_begun = False
        self._is_written = False

    def _number_of_next(self) -> int:
        return int(self._args.curr_iteration) + 1

    def _end_of_run(self, first: int) -> int:
        return end_of_run(first, self._args.train_iters, getattr(self._args, "exit_interval", None))

    def make_folders(self) -> None:
        """Now, and not after hours of training.

        Raises:
            UserError: it cannot be written there.
        """
        check_costs_file(self._options)
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
        """After the last one to record, write."""
        super().end_iteration(completed)
        if completed and self.iteration >= self.last and not self._is_written:
            self._is_written = True
            atexit.unregister(self._check)
            for sentence in self.write(self._directory, self._costs_file, self.pipeline):
                self._say(sentence)

    def _check(self) -> None:
        """For ``atexit``."""
        if self._has_begun and not self._is_written:
            self._say(f"the job ended before iteration {self.last}, the last to record: no trace is written")
