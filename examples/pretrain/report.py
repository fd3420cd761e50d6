"""Report a run: a progress bar on a terminal or plain log lines, JSON lines in a file, and TensorBoard events."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from megatron.zero_bubble.core.analysis.bubble import Bubble
from megatron.zero_bubble.core.errors import UserError

_BAR = 24


@dataclass(frozen=True)
class IterationMetrics:
    """Metrics of one training iteration: a line of ``--metrics-file`` with ``"kind": "train"``."""

    iteration: int
    consumed_samples: int
    num_microbatches: int
    lm_loss: float | None
    grad_norm: float | None
    learning_rate: float
    loss_scale: float
    skipped: bool
    iteration_ms: float
    tokens_per_second: float
    num_zeros: float | None = None


@dataclass(frozen=True)
class BubbleMetrics(Bubble):
    """Bubble of the iterations since the previous report: a line of ``--metrics-file`` with ``"kind": "bubble"``.

    Attributes:
        iteration: the last iteration.
        steps: with post-validation, the number of optimizer steps so far, the same on every rank.
        waited, repeated: with post-validation, the number of steps that ranks waited for, and that they rolled back and
            repeated, each summed over all ranks.
    """

    iteration: int
    steps: int | None = None
    waited: int | None = None
    repeated: int | None = None


class Progress:
    """Report a run from one rank; on the other ranks, print nothing and open no files.

    Args:
        reporting: whether this rank reports.
        train_iters: number of iterations of the whole run.
        metrics_file: file to append to, one JSON object per line.
        tensorboard_dir: directory for event files, which are written if TensorBoard is installed.
    """

    def __init__(
        self, reporting: bool, train_iters: int, metrics_file: str | None = None, tensorboard_dir: str | None = None
    ) -> None:
        self._reporting = reporting
        self._train_iters = train_iters
        self._file: TextIO | None = None
        self._board: Any = None
        self._bar = reporting and sys.stdout.isatty()
        self._drawn = 0.0
        self._last = ""
        if not reporting:
            return
        if metrics_file:
            self._file = _open(Path(metrics_file))
        if tensorboard_dir:
            self._board = self._open_board(tensorboard_dir)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            print(flush=True)
        for sink in (self._file, self._board):
            if sink is not None:
                sink.close()

    def say(self, text: str) -> None:
        """Print one line, above the progress bar if there is one."""
        if self._reporting:
            print(("\r\033[K" if self._bar else "") + text, flush=True)

    def iterations(self, done: list[IterationMetrics], bubble: BubbleMetrics | None = None) -> None:
        """Report the iterations since the last report: all of them to the files, the last one on the screen.

        With post-validation, ``done`` may be empty although there is a ``bubble``: no optimizer step is final yet.
        """
        if not self._reporting:
            return
        for metrics in done:
            self._record("train", asdict(metrics))
        if bubble is not None:
            self._record("bubble", {name: value for name, value in asdict(bubble).items() if value is not None})
        if done:
            self._show(done, bubble)

    def reached(self, iteration: int) -> None:
        """Move the progress bar between reports, at most once per second; do nothing without a bar."""
        if self._bar and time.monotonic() - self._drawn >= 1.0:
            last = f"; last report:{self._last}" if self._last else ""
            self._draw(iteration, f" {iteration}/{self._train_iters}{last}")

    def evaluation(self, iteration: int, split: str, lm_loss: float | None) -> None:
        """Report the loss on the validation or test data."""
        if not self._reporting or lm_loss is None:
            return
        self._record("evaluation", {"iteration": iteration, "split": split, "lm_loss": lm_loss})
        self.say(f" {split} loss at iteration {iteration}: {lm_loss:.6f}")

    def _show(self, done: list[IterationMetrics], bubble: BubbleMetrics | None) -> None:
        last = done[-1]
        rate = sum(metrics.tokens_per_second * metrics.iteration_ms for metrics in done) / sum(
            metrics.iteration_ms for metrics in done
        )
        loss = "      -" if last.lm_loss is None else f"{last.lm_loss:.6f}"
        norm = "-" if last.grad_norm is None else f"{last.grad_norm:.3f}"
        text = (
            f" iteration {last.iteration:>{len(str(self._train_iters))}}/{self._train_iters} | loss {loss} | "
            f"grad norm {norm} | lr {last.learning_rate:.3e} | {rate:,.0f} tokens/s"
        )
        if last.num_zeros is not None:
            text += f" | num zeros {last.num_zeros:.0f}"
        if last.loss_scale != 1.0:
            text += f" | loss scale {last.loss_scale:.0f}"
        skipped = sum(metrics.skipped for metrics in done)
        if skipped:
            text += f" | skipped {skipped}"
        if bubble is not None:
            text += f" | {bubble}"
            if bubble.steps is not None:
                text += f" | steps {bubble.steps}, waited {bubble.waited}, repeated {bubble.repeated}"
        if self._bar:
            self._last = text
            self._draw(last.iteration, text)
        else:
            print(text, flush=True)

    def _draw(self, iteration: int, text: str) -> None:
        self._drawn = time.monotonic()
        filled = _BAR * iteration // self._train_iters
        print(f"\r\033[K[{'#' * filled}{'.' * (_BAR - filled)}]{text}", end="", flush=True)

    def _record(self, kind: str, values: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"kind": kind, **values}) + "\n")
            self._file.flush()
        if self._board is not None:
            group = values.get("split", kind)
            for name, value in values.items():
                if name != "iteration" and isinstance(value, (int, float)):
                    self._board.add_scalar(f"{group}/{name}", value, values["iteration"])

    def _open_board(self, directory: str) -> Any:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self.say(f"TensorBoard is not installed, so nothing is written to {directory}; pip install tensorboard")
            return None
        return SummaryWriter(directory)


def _open(path: Path) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a", encoding="utf-8")
    except OSError as error:
        problem = f"--metrics-file needs a writable file, got {path} ({error.strerror}); give another path"
        raise UserError(problem, everywhere=False) from None
