"""Functions that the benches share: start the ranks, interleave the variants, and write the JSON."""

from __future__ import annotations

import gc
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import quantiles
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    """The environment of this process, with this checkout's benches, training loop and package on Python's path."""
    folders = [str(ROOT / "scripts"), str(ROOT / "examples"), str(ROOT)]
    paths = [*folders, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def launch(bench: str, num_ranks: int, arguments: Sequence[str]) -> None:
    """Run ``bench`` on ``num_ranks`` single-threaded processes; exit this process if they fail."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command += ["--module", f"bench.{bench}", *arguments]
    code = subprocess.run(command, env=environment() | {"OMP_NUM_THREADS": "1"}, check=False).returncode
    if code:
        sys.exit(code)


def on_ranks() -> bool:
    """Whether this process is one that ``launch`` started."""
    return "RANK" in os.environ


def leave() -> None:
    """End all process groups, also those in reference cycles: gloo aborts if one still exists when Python exits."""
    import torch.distributed as dist

    gc.collect()
    dist.destroy_process_group()


def is_first() -> bool:
    """Whether this process prints and writes for all ranks."""
    return os.environ.get("RANK", "0") == "0"


def interleaved(variants: dict[str, Callable[[], float]], rounds: int, warm_up: int = 1) -> dict[str, list[float]]:
    """Run every variant once per round, so that a slow minute of the machine slows all of them; values by variant.

    Each round starts with the next variant, so that the order within a round favours none of them.
    """
    names = list(variants)
    values: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warm_up + rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            value = variants[name]()
            if number >= warm_up:
                values[name].append(value)
        if is_first():
            print(f"\r  round {number + 1}/{warm_up + rounds}", end="\n" if number + 1 == warm_up + rounds else "")
            sys.stdout.flush()
    return values


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third quartile; for a single value, both are that value."""
    low, _, high = quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return low, high


def machine() -> dict[str, Any]:
    """The machine and the versions with which figures were measured."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": version("torch"),
        "megatron_core": version("megatron-core"),
        "commit": commit(),
    }


def commit() -> str:
    """The commit of this checkout, with ``-dirty`` appended if files differ; "unknown" if git fails."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _processor() -> str:
    """The model name of the processor from /proc/cpuinfo, or else what Python's platform module has."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def write(path: Path, content: dict[str, Any]) -> None:
    """Write results as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")


def on_pipeline(
    bench: str, num_ranks: int, measure: Callable[[], Any], report: Callable[[Any, tuple[float, float]], None]
) -> int:
    """Run a bench on the CPU ranks of one pipeline: start them, or run as one of them; return 0.

    Args:
        measure: called on every rank; its result goes to ``report``.
        report: called on the first rank, also with the load average before and after.
    """
    if not on_ranks():
        launch(bench, num_ranks, sys.argv[1:])
        return 0
    import torch.distributed as dist

    from megatron.zero_bubble.engine.platforms import select
    from pretrain.quiet import quiet

    select("cpu").setup(0)
    dist.init_process_group("gloo")
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=num_ranks, create_gloo_process_groups=False)
    load = os.getloadavg()[0]
    with quiet():
        result = measure()
    if is_first():
        report(result, (load, os.getloadavg()[0]))
    leave()
    return 0
