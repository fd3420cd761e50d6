"""Run all benches, each in a separate process, and write the page of their figures.

Results go to ``runs/bench/<run>/``: a JSON and a log for each bench, ``run.json`` and ``benchmarks.md``. A full run
then replaces ``docs/benchmarks.json``, ``docs/benchmarks.md`` and ``docs/scaling.svg``; ``scripts/generate_docs.py``
brings the README's results up to date. A bench that fails or takes too long costs the others nothing; the page says so
and the exit code is 1.

    bash scripts/bench.sh [--quick]
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench import page, ranks
from megatron.zero_bubble.engine.platforms import select

LAST_LINES = 12
"""Number of lines of a failed bench's log that the page shows."""
_PATIENCE = 3.0
"""Time limit as a multiple of the expected time: machines differ, but a bench that hangs must end."""
_GRACE_S = 20.0


@dataclass(frozen=True)
class Bench:
    """One bench: a section of the page, a module and its arguments, and the seconds it takes on two idle cores.

    It needs ``num_gpus`` GPUs; ``--output`` is added to the arguments.
    """

    name: str
    module: str
    arguments: str
    expected_s: float
    num_gpus: int = 0

    @property
    def timeout_s(self) -> float:
        return 60 + _PATIENCE * self.expected_s


PUBLISHED_TIMES = "--costs configs/published/gpt_28.3b_a100.json"
FULL = (
    Bench("emulated", "emulated_compute", "--clock wall --pass-ms 50 --rounds 5", 320),
    Bench("virtual", "emulated_compute", "--clock virtual", 60),
    Bench("tracing", "tracing", "--only zb-h1 zb-v --rounds 5", 85),
    Bench("real-compute", "real_compute", "--num-microbatches 4 8 --rounds 6 --only zb-h1 zb-v", 270),
    Bench("passes", "real_compute", "--num-ranks 1 --num-microbatches 4 --hidden-size 256 --rounds 7", 45),
    Bench("wgrad", "wgrad", "--hidden-size 1024 --tokens 512 --rounds 7", 80),
    Bench("post-validation", "post_validation", "period --rounds 3", 125),
    Bench("rollback", "post_validation", "rollback", 20),
    Bench("peers", "peer_schedules", "--sample 50", 90),
    Bench("scaling", "scaling", f"{PUBLISHED_TIMES} --planned docs/scaling.json", 75),
)
"""The benches of a full run: under 20 minutes on two idle cores."""
_SIZES_ON_GPUS = (
    "--device cuda --dtype bfloat16 --hidden-size 4096 --seq-length 4096 --num-microbatches 8 --rounds 9 "
    "--flags=--recompute-activations"  # the local attention keeps scores of 1 GiB per layer otherwise
)
ON_GPUS = (
    Bench("wgrad-cuda", "wgrad", "--device cuda --hidden-size 4096 --tokens 4096 --rounds 9", 60, num_gpus=1),
    Bench(
        "passes-cuda",
        "real_compute",
        f"--num-ranks 1 --num-layers 4 {_SIZES_ON_GPUS}",
        90,
        num_gpus=1,
    ),
    Bench(
        "real-compute-cuda",
        "real_compute",
        f"--num-layers 8 {_SIZES_ON_GPUS}",
        200,
        num_gpus=2,
    ),
)
"""The benches that a full run adds on a machine with GPUs."""
QUICK = (
    Bench(
        "emulated",
        "emulated_compute",
        "--clock wall --num-ranks 4 --num-microbatches 4 --pass-ms 10 --rounds 2",
        20,
    ),
    Bench("virtual", "emulated_compute", "--clock virtual --num-ranks 2 --kib 64", 15),
    Bench("tracing", "tracing", "--only zb-h1 --num-ranks 2 --num-microbatches 4 --pass-ms 5 --rounds 2", 10),
    Bench("real-compute", "real_compute", "--num-microbatches 2 --hidden-size 64 --rounds 2 --only zb-h1", 15),
    Bench("passes", "real_compute", "--num-ranks 1 --num-microbatches 2 --hidden-size 64 --rounds 2", 15),
    Bench("wgrad", "wgrad", "--hidden-size 64 --tokens 64 --rounds 2", 5),
    Bench(
        "post-validation", "post_validation", "period --num-ranks 2 --num-microbatches 4 --pass-ms 10 --rounds 2", 10
    ),
    Bench("rollback", "post_validation", "rollback --elements 160000 --rounds 2", 5),
    Bench("peers", "peer_schedules", "--sample 4", 10),
    Bench("scaling", "scaling", f"{PUBLISHED_TIMES} --num-ranks 2 4 8 --num-microbatches 16 --plan-up-to 64", 10),
)
"""The same benches at small sizes, whose figures are meaningless."""


def main() -> int:
    """Run the benches, write the results and print where they are; return 1 if a bench failed."""
    options = _parse()
    folder = options.folder / options.name
    folder.mkdir(parents=True, exist_ok=False)
    record = run(QUICK if options.quick else (*FULL, *_possible(ON_GPUS)), folder, quick=options.quick)
    ranks.write(folder / page.RECORD, record)
    summary = page.summarize(folder)
    (folder / page.PAGE.name).write_text(page.render(summary), encoding="utf-8")
    print(f"page written to {folder / page.PAGE.name}")
    if not options.quick:
        page.publish(summary, ranks.ROOT, folder / page.CHART)
        print(f"{page.PAGE} and {page.STORED} are those of this run; scripts/generate_docs.py updates the README")
    failed = [bench["name"] for bench in record["benches"] if bench["status"] != page.OK]
    if failed:
        print(f"bench.sh: failed: {', '.join(failed)}; their logs are in {folder}", file=sys.stderr)
    return int(bool(failed))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.sh", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="small sizes, to check that all benches run")
    now = datetime.now(timezone.utc)
    parser.add_argument("--name", default=f"{now:%Y-%m-%d-%H%M%S}", help="name of the run; default: the time")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"), help="folder of all runs")
    options = parser.parse_args()
    if (options.folder / options.name).exists():
        parser.error(f"--name must be new; {options.name} is in {options.folder} already; give another or drop --name")
    return options


def _possible(benches: Sequence[Bench]) -> list[Bench]:
    """The benches for which this machine has enough GPUs."""
    platform = select("auto")
    num_gpus = platform.device_count() if platform.name == "cuda" else 0
    return [bench for bench in benches if bench.num_gpus <= num_gpus]


def run(benches: Sequence[Bench], folder: Path, quick: bool, package: str = "bench") -> dict[str, Any]:
    """Run every bench in turn; return how each ended, and on which machine.

    Args:
        folder: existing folder for one JSON and one log per bench.
        package: package of the benches' modules.
    """
    began, before = datetime.now(timezone.utc), os.getloadavg()
    expected = sum(bench.expected_s for bench in benches)
    print(f"{len(benches)} benches, about {_minutes(expected)} minutes on two idle cores, into {folder}", flush=True)
    done = []
    for number, bench in enumerate(benches, 1):
        head = f"[{number}/{len(benches)}] {bench.name}, about {_minutes(bench.expected_s)}"
        done.append(_result(bench, folder, head, package))
    return {
        "run": folder.name,
        "quick": quick,
        "began": f"{began:%Y-%m-%d %H:%M} UTC",
        "seconds": round((datetime.now(timezone.utc) - began).total_seconds()),
        "machine": ranks.machine() | {"device": select("auto").describe()},
        "load_average": {"before": before, "after": os.getloadavg()},
        "benches": done,
    }


def _result(bench: Bench, folder: Path, head: str, package: str) -> dict[str, Any]:
    """Run one bench; return how it ended, with the last lines of its log if it failed."""
    print(head, end="" if sys.stdout.isatty() else "\n", flush=True)
    output, log = folder / f"{bench.name}.json", folder / f"{bench.name}.log"
    module = f"{package}.{bench.module}"
    command = [sys.executable, "-m", module, *shlex.split(bench.arguments), "--output", str(output)]
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, env=ranks.environment(), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        code = _wait(process, bench.timeout_s, head)
    seconds = time.monotonic() - started
    if code == 0:
        status = page.OK if output.exists() else "exit code 0, nothing written"
    else:
        status = "timed out" if code is None else f"exit code {code}"
    print(f"\r{head}: {status} after {_minutes(seconds)}", flush=True)
    result: dict[str, Any] = {
        "name": bench.name,
        "command": f"bash scripts/bench.sh {bench.module} {bench.arguments}",
        "seconds": round(seconds, 1),
        "status": status,
    }
    if status != page.OK:
        result["last_lines"] = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
    return result


def _wait(process: subprocess.Popen[bytes], timeout_s: float, head: str) -> int | None:
    """Wait and show the time; return the exit code, or None after a timeout. The process is ended in any case."""
    started = time.monotonic()
    try:
        while (seconds := time.monotonic() - started) < timeout_s:
            if sys.stdout.isatty():
                print(f"\r{head}: {_minutes(seconds)}", end="", flush=True)
            try:
                return process.wait(1.0)
            except subprocess.TimeoutExpired:
                continue
        return None
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the rest of the process group, first by SIGTERM, so that a launcher of ranks ends its ranks before itself."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        if not _signal(process, how):
            return
        until = time.monotonic() + _GRACE_S
        while time.monotonic() < until:
            process.poll()  # reap the process, which would otherwise keep the group alive
            if not _signal(process, 0):
                return
            time.sleep(0.1)


def _signal(process: subprocess.Popen[bytes], number: int) -> bool:
    """Send a signal to the process group; return whether the group still exists."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


if __name__ == "__main__":
    sys.exit(main())
