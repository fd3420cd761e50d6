"""``--zero-bubble-trace`` and ``--zero-bubble-record-costs`` in a Megatron-LM job, whose loop and end are its own.

Iterations are numbered as Megatron numbers them. The files are written right after the passes of the last one that is
recorded, while all ranks are at the same place. Rank 0 writes them, so it alone knows whether it can.
"""

from __future__ import annotations

import argparse
import atexit
import functools
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


class JobTrace:
    """Records the iterations of a job that its flags choose.

    Args:
        options: our flags.
        args: the job's, validated; read when it trains, because it counts its iterations late.
        say: where it says that it has written, or could not, on rank 0.
    """

    def __init__(self, options: argparse.Namespace, args: Any, say: Callable[[str], None]) -> None:
        self.recorder = Recorder(select("auto"))
        self._options, self._args, self._say = options, args, say
        self._tracer: Tracer | None = None
        self._directory, self._costs_file = (
            Path(path).resolve() if path else None
            for path in (options.zero_bubble_trace, options.zero_bubble_record_costs)
        )
        self._is_written = False

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

    def around(self, pipeline: Pipeline) -> Callable[..., Any]:
        """The forward-backward function of ``pipeline``, recorded."""

        @functools.wraps(pipeline.forward_backward)
        def forward_backward(**call: Any) -> Any:
            if call.get("forward_only"):
                return pipeline.forward_backward(**call)
            iteration = self._args.curr_iteration + 1
            if self._tracer is None:
                self._tracer = self._start(iteration)
            result = self._tracer.around_passes(iteration, lambda: pipeline.forward_backward(**call))
            if iteration >= self._tracer.last and not self._is_written:
                self._is_written = True
                atexit.unregister(self._check)
                for sentence in self._tracer.write(self._directory, self._costs_file, pipeline):
                    self._say(sentence)
            return result

        return forward_backward

    def _start(self, iteration: int) -> Tracer:
        """Before the first iteration of this run."""
        atexit.register(self._check)
        options, args = self._options, self._args
        end = end_of_run(iteration, args.train_iters, getattr(args, "exit_interval", None))
        name = options.zero_bubble_schedule or options.zero_bubble_schedule_file
        return Tracer(self.recorder, name, end, options.zero_bubble_trace_iterations)

    def _check(self) -> None:
        """For ``atexit``."""
        if self._tracer is not None and not self._is_written:
            self._say(f"the job ended before iteration {self._tracer.last}, the last to record: no trace is written")
