"""What the modules of steps share: their command line, their figures, and times on a device."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the arguments that every step takes."""
    made = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else None)
    made.add_argument("--device", choices=("cpu", "cuda"), required=True)
    made.add_argument("--output", type=Path, required=True, help="file for the figures")
    return made


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that ``gpt.Gpt`` reads."""
    parser.add_argument("--hidden-size", type=int, required=True)
    parser.add_argument("--num-layers", type=int, required=True)
    parser.add_argument("--seq-length", type=int, required=True)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--num-microbatches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)


def write(path: Path, figures: dict[str, Any]) -> None:
    """Write the figures of the step; on several ranks, those of rank 0."""
    if os.environ.get("RANK", "0") == "0":
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(figures, indent=1))


def time_us(work: Callable[[], object], device: str, rounds: int, calls: int = 10) -> float:
    """The median over ``rounds`` of the mean time of one of ``calls`` calls, in microseconds, after a first call."""
    work()
    return median(_round_us(work, device, calls) for _ in range(rounds))


def _round_us(work: Callable[[], object], device: str, calls: int) -> float:
    if device == "cpu":
        began = time.perf_counter()
        for _ in range(calls):
            work()
        return (time.perf_counter() - began) * 1e6 / calls
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / calls
