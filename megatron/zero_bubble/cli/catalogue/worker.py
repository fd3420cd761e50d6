"""Judges recipes in a process of its own, which limits itself (``answers.py`` starts it)."""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from contextlib import suppress
from dataclasses import asdict

from megatron.zero_bubble.cli.catalogue.answers import NO_MEMORY
from megatron.zero_bubble.cli.catalogue.judge import judged
from megatron.zero_bubble.cli.catalogue.recipe import Recipe


def main(gpu: str, seconds: int, gib: float) -> int:
    """Read recipes from standard input, one JSON object per line, and write a row for each; return the exit status."""
    _limit(resource.RLIMIT_AS, int(gib * 2**30))
    _limit(resource.RLIMIT_CORE, 0)
    for line in sys.stdin:
        fields = json.loads(line)
        _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + seconds)  # beyond it, the system ends the process
        try:
            row = judged(Recipe(**{**fields, "flags": tuple(fields["flags"])}), gpu)
        except MemoryError:
            return NO_MEMORY
        print(json.dumps(asdict(row)), flush=True)
    return 0


def _limit(what: int, most: int) -> None:
    """Set a limit, or keep a lower one."""
    hard = resource.getrlimit(what)[1]
    with suppress(ValueError, OSError):  # a limit that this system does not have
        resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
