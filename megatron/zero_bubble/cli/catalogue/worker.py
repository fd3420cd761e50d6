"""Judges recipes in a process of its own, which limits itself (``answers.py`` starts it)."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from queue import SimpleQueue
from threading import Thread

from megatron.zero_bubble.cli.catalogue.answers import NO_MEMORY
from megatron.zero_bubble.cli.catalogue.judge import judged
from megatron.zero_bubble.cli.catalogue.recipe import Recipe


def main(gpu: str, seconds: int, gib: float, searches: bool) -> int:
    """Read recipes from standard input, one JSON object per line, and write a row for each, until the input ends, which
    ends this process; return the exit status of what ends it earlier. The arguments are those of ``rows_of``.
    """
    _limit(resource.RLIMIT_AS, int(gib * 2**30))
    _limit(resource.RLIMIT_CORE, 0)
    lines: SimpleQueue[str] = SimpleQueue()
    Thread(target=_receive, args=(lines,), daemon=True).start()
    while True:
        fields = json.loads(lines.get())
        _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + seconds)  # beyond it, the system ends the process
        try:
            row = judged(Recipe(**{**fields, "flags": tuple(fields["flags"])}), gpu, searches)
        except MemoryError:
            return NO_MEMORY
        print(json.dumps(asdict(row)), flush=True)


def _receive(lines: SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)  # who has started us has ended, and waits for no answer


def _limit(what: int, most: int) -> None:
    """Set a limit, or keep a lower one."""
    hard = resource.getrlimit(what)[1]
    with suppress(ValueError, OSError):  # a limit that this system does not have
        resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
