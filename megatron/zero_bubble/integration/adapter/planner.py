"""Runs ``planning.worker`` in a separate process, to plan a schedule during training."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.files import json_object
from megatron.zero_bubble.core.formats.plan import read_schedule_file
from megatron.zero_bubble.core.ir import Schedule
from megatron.zero_bubble.planning import worker
from megatron.zero_bubble.planning.worker import Request


class Planner:
    """A planning process. Errors of the operating system do not raise; ``result`` then returns no schedule.

    Attributes:
        limit: the memory limit that the schedule of ``result`` was searched with, in bytes; None before.
    """

    def __init__(self, request: Request) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._refused: OSError | None = None
        self.limit: float | None = None
        try:
            self._start(request)
        except OSError as error:
            self._refused = error

    def _start(self, request: Request) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="zb-auto-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        # Files instead of pipes, so that neither this rank nor the planning process waits for the other to read.
        _request_in(folder).write_text(request.to_json(), encoding="utf-8")
        command = [sys.executable, "-m", worker.__name__]
        with (
            _request_in(folder).open() as asked,
            _plan_in(folder).open("w") as plan,
            _errors_in(folder).open("w") as errors,
        ):
            self._process = subprocess.Popen(command, stdin=asked, stdout=plan, stderr=errors)

    def finished(self) -> bool:
        """Whether the process has ended or could not be started."""
        return self._process is None or self._process.poll() is not None

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._remove_files()

    def result(self) -> tuple[Schedule | None, str]:
        """The schedule and a log message about it; None and the reason if there is no schedule."""
        try:
            schedule, said = self._read()
        except (OSError, UserError) as error:  # read_schedule_file raises UserError
            schedule, said = None, str(error)
        self._remove_files()
        if schedule is None:
            return None, f"no plan, the schedule stays as it is: {said}"
        return schedule, "switched to the planned schedule"

    def _read(self) -> tuple[Schedule | None, str]:
        if self._refused is not None:
            raise self._refused
        assert self._process is not None and self._folder is not None, "the process was started"
        folder = Path(self._folder.name)
        if self._process.wait():
            return None, _errors_in(folder).read_text(encoding="utf-8").strip()
        self.limit = json_object(_plan_in(folder).read_text(encoding="utf-8")).get(worker.MEMORY_LIMIT)
        return read_schedule_file(_plan_in(folder)), ""

    def _remove_files(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()


def _request_in(folder: Path) -> Path:
    return folder / "request.json"


def _plan_in(folder: Path) -> Path:
    return folder / "plan.json"


def _errors_in(folder: Path) -> Path:
    return folder / "errors.txt"
