"""The rows of recipes, with a limit on the time and the memory that each may take.

A worker judges them (``worker.py``). A recipe that takes too much ends it, and the next one gets a new one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from megatron.zero_bubble.cli.catalogue.judge import Row, unanswered
from megatron.zero_bubble.cli.catalogue.recipe import Recipe

SECONDS, GIB = 30, 6
"""CPU time for the answer to one recipe, and the worker's address space."""
SECONDS_OF_SEARCHES = 600
"""The same with searches."""
NO_MEMORY = 3
"""The exit status of a worker that cannot get more memory."""
_LARGE = "ask zero-bubble advise, which has no such limit, or lower --global-batch-size"
_WORKER = """
import os, sys
sys.path[:] = sys.argv[1].split(os.pathsep)
from megatron.zero_bubble.cli.catalogue.worker import main
sys.exit(main(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.argv[5] == "True"))
"""
"""Imports what this process would, and nothing from the folder that the command is called in."""


def rows_of(
    recipes: Iterable[Recipe], gpu: str, seconds: int = SECONDS, gib: float = GIB, searches: bool = False
) -> Iterator[Row]:
    """Yield the row of every recipe.

    Args:
        gpu: a key of ``DEVICES``, for recipes that do not say on which they run.
        seconds, gib: the limits.
        searches: as in ``judged``.
    """
    paths = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", _WORKER, paths, gpu, str(seconds), str(gib), str(searches)]
    worker: subprocess.Popen[str] | None = None
    try:
        for recipe in recipes:
            if worker is None:
                worker = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
                )
            if (fields := _answer(worker, recipe)) is not None:
                yield Row(**fields)
                continue
            reasons = {
                -signal.SIGXCPU: f"it took longer than {seconds} s of CPU; {_LARGE}",
                -signal.SIGKILL: f"its worker was killed, as systems without memory do; {_LARGE}",
                NO_MEMORY: f"it took more than {gib:g} GiB of memory; {_LARGE}",
            }
            status = worker.wait()
            error = f"an error of this package ended its worker with exit status {status}; report it with its traceback"
            yield unanswered(recipe, gpu, reasons.get(status, error))
            worker = None
    finally:
        if worker is not None:
            worker.kill()
            worker.wait()


def _answer(worker: subprocess.Popen[str], recipe: Recipe) -> dict[str, Any] | None:
    """The fields of the row; None if the worker has ended instead."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        print(json.dumps(asdict(recipe)), file=worker.stdin, flush=True)
    except BrokenPipeError:  # it has ended between two recipes
        return None
    line = worker.stdout.readline()
    return json.loads(line) if line else None
