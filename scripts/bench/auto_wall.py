"""What ``zero-bubble advise`` promises, and what ``--zero-bubble-schedule auto`` reaches, in runs on CPU ranks.

Six small jobs of ``scripts/pretrain_gpt.py`` are run in whole: even stages, stages of different work, a large
vocabulary, one long sequence per iteration, little memory, and a virtual pipeline. Per job:

1. A run under a schedule that splits its backwards records costs, with which ``advise --costs`` predicts the gain of
   each change.
2. Rounds of runs follow: the job as it is, the advised changes and some by name, and ``auto``, which finds the recorded
   costs next to its checkpoints. Each round runs every variant once, and begins with another variant.

The time of a run is the median of its last iterations, by when ``auto`` has planned. Gains are ratios within a round,
and their median over rounds. They include the optimizer step, which predictions leave out.

    bash scripts/bench.sh auto_wall [--jobs NAME ...] [--num-ranks 2] [--rounds 3] [--iterations 50]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from bench import ranks
from megatron.zero_bubble.cli.advise import changed
from megatron.zero_bubble.cli.deciding import COSTS

_LAST = 8
"""Iterations at the end of a run of which the median counts, and that are recorded."""
STOCK, AUTO = "stock", "auto"
MODEL = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 4096 "
    "--micro-batch-size 1 --global-batch-size 4 --tokenizer-type NullTokenizer --vocab-size 511 "
    "--make-vocab-size-divisible-by 4 --lr 1e-4 --untie-embeddings-and-output-weights --mock-data "
    "--zero-bubble-device cpu --log-interval 1"
)


class Job(NamedTuple):
    """A job of the bench.

    Attributes:
        flags: what it has besides, or instead of, ``MODEL``.
        named: flags of changes to try, by name, besides those of ``advise``.
        limit: memory limit of activations.
    """

    flags: str
    named: Mapping[str, str]
    limit: str | None = None


def _by_name(*names: str) -> dict[str, str]:
    return {name: f"--zero-bubble-schedule {name}" for name in names}


_CHAIN = _by_name("zb-h1", "zb-h2")
JOBS = {
    "even": Job("", _CHAIN | _by_name("zb-v")),
    "uneven": Job("--decoder-first-pipeline-num-layers 3", _CHAIN),
    "vocabulary": Job("--vocab-size 8191", _CHAIN | _by_name("zb-v")),
    "long": Job("--seq-length 1024 --global-batch-size 1", _by_name("seq-1f1b")),
    "memory": Job("--global-batch-size 6", _by_name("v-half", "v-min"), "0.6p"),
    "interleaved": Job("--num-virtual-stages-per-pipeline-rank 2", _by_name("zb-interleaved")),
}


def main() -> int:
    """Run the jobs, print a table, and write the figures."""
    options = _parse()
    results = {}
    before = os.getloadavg()[0]
    for name in options.jobs:
        results[name] = _measured(name, JOBS[name], options)
        _print(name, results[name])
    load = before, os.getloadavg()[0]
    content = {"machine": ranks.machine(), "load": load, "num_ranks": options.num_ranks, "jobs": results}
    ranks.write(options.output, content)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", nargs="+", choices=tuple(JOBS), default=tuple(JOBS))
    parser.add_argument("--num-ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--output", type=Path, default=Path("runs/bench/auto_wall.json"))
    return parser.parse_args()


def _measured(name: str, job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """Record costs, ask for advice, and run the variants in rounds."""
    argv = changed(MODEL.split(), job.flags.split(), ())
    argv += ["--pipeline-model-parallel-size", str(options.num_ranks)]
    with TemporaryDirectory(prefix="zb-auto-wall-") as folder:
        costs = Path(folder) / COSTS
        splits = "zb-interleaved" if "--num-virtual-stages-per-pipeline-rank" in argv else "zb-h1"
        recording = [*argv, "--zero-bubble-schedule", splits, "--zero-bubble-record-costs", str(costs)]
        _run(recording, options.num_ranks, 2 * _LAST)
        advice = _advice(argv, costs, options.num_ranks, job.limit)
        variants = {STOCK: argv, AUTO: [*argv, "--zero-bubble-schedule", "auto"]}
        if job.limit is not None:
            variants[AUTO] += ["--zero-bubble-memory-limit", job.limit]
        variants |= {named: [*argv, *flags.split()] for named, flags in job.named.items()}
        best = None if advice["best"] is None else advice["advice"][advice["best"] - 1]
        if best is not None:
            variants[best["name"]] = changed(argv, best["flags"], best["leave_out"])

        def seconds(variant: str) -> float:
            with TemporaryDirectory(prefix="zb-auto-wall-") as saved:
                more = []
                if variant == AUTO:
                    shutil.copy(costs, saved)
                    more = ["--save", saved]
                number = options.iterations if "zb-auto" in variants[variant] or variant == AUTO else _LAST + 4
                return _run([*variants[variant], *more], options.num_ranks, number)

        times = ranks.interleaved({each: partial(seconds, each) for each in variants}, options.rounds, 0)
    ratios = {
        each: median(1 - own / stock for own, stock in zip(of, times[STOCK], strict=True)) for each, of in times.items()
    }
    predicted = {row["name"]: row["gain"] for row in advice["advice"]}
    return {
        "job_ms": advice["job"]["makespan_ms"],
        "stock_ms": median(times[STOCK]),
        "advised": None if best is None else best["name"],
        "predicted": predicted,
        "measured": ratios,
        "times_ms": times,
        "dropped": advice["dropped"],
    }


def _advice(argv: Sequence[str], costs: Path, num_ranks: int, limit: str | None) -> dict[str, Any]:
    command = [sys.executable, "-m", "megatron.zero_bubble", "advise", "--costs", str(costs), "--format", "json"]
    command += ["--gpus-per-node", str(num_ranks), *(["--memory-limit", limit] if limit else [])]
    command += ["--", *changed(argv, (), ("--zero-bubble-device",))]
    done = subprocess.run(command, env=ranks.environment(), check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _run(argv: Sequence[str], num_ranks: int, iterations: int) -> float:
    """Run a job, and return the median time of its last iterations in ms.

    Raises:
        SystemExit: it fails.
    """
    with TemporaryDirectory(prefix="zb-auto-wall-") as folder:
        metrics = Path(folder) / "metrics.jsonl"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        command += [str(ranks.ROOT / "scripts" / "pretrain_gpt.py"), *argv, "--train-iters", str(iterations)]
        command += ["--metrics-file", str(metrics)]
        environment = ranks.environment() | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
        if done.returncode:
            print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
            raise SystemExit(done.returncode)
        if "auto" in argv:
            print("".join(f"    {line}\n" for line in done.stdout.splitlines() if "auto" in line), end="")
        lines = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
        times = [line["iteration_ms"] for line in lines if line["kind"] == "train"]
    return float(median(times[-_LAST:]))


def _print(name: str, found: Mapping[str, Any]) -> None:
    print(f"\n{name}: stock {found['stock_ms']:.1f} ms, of which {found['job_ms']:.1f} ms of passes by recorded costs")
    for variant, gain in sorted(found["measured"].items(), key=lambda each: -each[1]):
        predicted = found["predicted"].get(variant)
        note = "" if predicted is None else f"   predicted {predicted:6.1%}"
        print(f"  {variant:40}{gain:8.1%}{note}{'   advised' * (variant == found['advised'])}")


if __name__ == "__main__":
    sys.exit(main())
