"""What ``zero-bubble advise`` promises, and what ``--zero-bubble-schedule auto`` reaches, in runs on CPU ranks.

Six small jobs of ``scripts/pretrain_gpt.py`` are run in whole: even stages, stages of different work, a large
vocabulary, one long sequence and fewer microbatches than ranks, little memory, and a virtual pipeline. Every rank seems
to have a device whose matrix products take the time of their operations (``emulated_device``). Per job:

1. A run under a schedule that splits its backwards records costs, with which ``advise --costs`` predicts the gain of
   each change.
2. Rounds of runs follow: the job as it is, the advised changes and some by name, and ``auto``, which finds the recorded
   costs next to its checkpoints. Each round runs every variant once, and begins with another variant.

The time of a run is the median of its last iterations, by when ``auto`` has planned. Gains are ratios within a round,
and their median over rounds. They include the optimizer step, which predictions leave out.

    bash scripts/bench.sh auto_wall [--jobs NAME ...] [--num-ranks 4] [--rounds 3] [--gflops 0.25]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from bench import ranks
from bench.emulated_device import run
from megatron.zero_bubble.cli.advise import changed
from megatron.zero_bubble.cli.deciding import COSTS

_LAST = 5
"""Iterations at the end of a run of which the median counts, and that are recorded."""
_FIRST = 2
"""Iterations before these."""
PLANNING = 13
"""Iterations before these of a run that plans: it measures, plans, and measures the plan. Shorter ones need more."""
STOCK, AUTO = "stock", "auto"
SCRIPT = ranks.ROOT / "scripts" / "pretrain_gpt.py"
MODEL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 4096 "
    "--micro-batch-size 1 --global-batch-size 4 --tokenizer-type NullTokenizer --vocab-size 127 "
    "--make-vocab-size-divisible-by 4 --lr 1e-4 --untie-embeddings-and-output-weights --mock-data "
    "--zero-bubble-device cpu --log-interval 1 --eval-iters 0"
)


class Job(NamedTuple):
    """A job of the bench.

    Attributes:
        flags: what it has besides, or instead of, ``MODEL``.
        named: flags of changes to try, by name, besides those of ``advise``.
        limit: memory limit of activations.
        speed: of its devices, relative to those of the other jobs. Where passes are cut into short slices, slower
            devices keep what Python takes for each small.
    """

    flags: str
    named: Mapping[str, str]
    limit: str | None = None
    speed: float = 1.0


def _by_name(*names: str) -> dict[str, str]:
    return {name: f"--zero-bubble-schedule {name}" for name in names}


_CHAIN = _by_name("zb-h1", "zb-h2")
JOBS = {
    "even": Job("", _CHAIN | _by_name("zb-v")),
    "uneven": Job("--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3", _CHAIN),
    "vocabulary": Job("--vocab-size 2047", _CHAIN | _by_name("zb-v")),
    "long": Job("--num-layers 4 --seq-length 128 --global-batch-size 2", _by_name("seq-1f1b", "seq-zb-h1"), speed=0.15),
    "memory": Job("--global-batch-size 8", _by_name("v-half", "v-min"), "0.8p"),
    "interleaved": Job("--num-virtual-stages-per-pipeline-rank 2", _by_name("zb-interleaved")),
}


def main() -> int:
    """Run the jobs, print a table, and write the figures."""
    options = _parse()
    _import_early()
    results = {}
    before = os.getloadavg()[0]
    for name in options.jobs:
        results[name] = _measured(JOBS[name], options)
        show(name, results[name])
        settings = {"num_ranks": options.num_ranks, "gflops": options.gflops, "rounds": options.rounds}
        load = before, os.getloadavg()[0]
        ranks.write(options.output, {"machine": ranks.machine(), "load": load, **settings, "jobs": results})
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", nargs="+", choices=tuple(JOBS), default=tuple(JOBS))
    parser.add_argument("--num-ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gflops", type=float, default=0.25, help="speed of the matrix products of a rank")
    parser.add_argument("--output", type=Path, default=Path("runs/bench/auto_wall.json"))
    return parser.parse_args()


def _import_early() -> None:
    """Import what every run needs, so that its ranks have it when they start."""
    import torch

    import pretrain.run  # noqa: F401

    torch.set_num_threads(1)


def _measured(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    argv = changed(MODEL.split(), job.flags.split(), ())
    start = partial(run, SCRIPT, num_ranks=options.num_ranks, gflops=job.speed * options.gflops)
    return compared(argv, job.named, job.limit, options.num_ranks, options.rounds, start)


def compared(
    argv: Sequence[str],
    named: Mapping[str, str],
    limit: str | None,
    num_ranks: int,
    rounds: int,
    start: Callable[[Sequence[str]], str],
    gpu: Sequence[str] = (),
    planning: int = PLANNING,
) -> dict[str, Any]:
    """Record costs of a job, ask for advice, and run its variants in rounds.

    Args:
        argv: the flags of the job, without the size of its pipeline, the number of iterations and a schedule.
        named: flags of changes to try, by name, besides those of ``advise``.
        limit: memory limit of activations, if any.
        start: runs ``SCRIPT`` with flags on the ranks, and returns what they print.
        gpu: flags that describe the GPUs to ``advise``.
        planning: iterations that a run needs to plan.
    """
    argv = [*argv, "--pipeline-model-parallel-size", str(num_ranks)]
    with TemporaryDirectory(prefix="zb-auto-wall-") as folder:
        costs = Path(folder) / COSTS
        splits = "zb-interleaved" if "--num-virtual-stages-per-pipeline-rank" in argv else "zb-h1"
        _run([*argv, "--zero-bubble-schedule", splits, "--zero-bubble-record-costs", str(costs)], _FIRST, start)
        recorded = json.loads(costs.read_text(encoding="utf-8"))
        given = ["--gpus-per-node", str(num_ranks), *gpu, *(["--memory-limit", limit] if limit else [])]
        advice = _advice(argv, costs, given)
        variants = {STOCK: argv, AUTO: [*argv, "--zero-bubble-schedule", "auto"]}
        if limit is not None:
            variants[AUTO] += ["--zero-bubble-memory-limit", limit]
        variants |= {name: [*argv, *flags.split()] for name, flags in named.items()}
        best = None if advice["best"] is None else advice["advice"][advice["best"] - 1]
        if best is not None:
            variants[best["name"]] = changed(argv, best["flags"], best["leave_out"])

        def seconds(variant: str) -> float:
            with TemporaryDirectory(prefix="zb-auto-wall-") as last:
                more = []
                if variant == AUTO:
                    shutil.copy(costs, last)
                    more = ["--load", last]  # which has no checkpoint, so that training starts from scratch
                plans = {AUTO, "zb-auto"} & set(variants[variant])
                return _run([*variants[variant], *more], planning if plans else _FIRST, start)

        times = ranks.interleaved({each: partial(seconds, each) for each in variants}, rounds, 0)
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
        "costs": recorded,
    }


def _advice(argv: Sequence[str], costs: Path, given: Sequence[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "megatron.zero_bubble", "advise", "--costs", str(costs), "--format", "json"]
    command += [*given, "--", *changed(argv, (), ("--zero-bubble-device",))]
    done = subprocess.run(command, env=ranks.environment(), check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _run(argv: Sequence[str], first: int, start: Callable[[Sequence[str]], str]) -> float:
    """Run a job, and return the median time in ms of its last iterations, after some first ones."""
    with TemporaryDirectory(prefix="zb-auto-wall-") as folder:
        metrics = Path(folder) / "metrics.jsonl"
        text = start([*argv, "--train-iters", str(first + _LAST), "--metrics-file", str(metrics)])
        print("".join(f"    {line}\n" for line in text.splitlines() if "auto: " in line), end="")
        lines = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
        times = [line["iteration_ms"] for line in lines if line["kind"] == "train"]
    return float(median(times[-_LAST:]))


def show(name: str, found: Mapping[str, Any]) -> None:
    """Print the gains of a job."""
    print(f"\n{name}: stock {found['stock_ms']:.1f} ms, of which {found['job_ms']:.1f} ms of passes by recorded costs")
    for variant, gain in sorted(found["measured"].items(), key=lambda each: -each[1]):
        predicted = found["predicted"].get(variant)
        note = "" if predicted is None else f"   predicted {predicted:6.1%}"
        print(f"  {variant:40}{gain:8.1%}{note}{'   advised' * (variant == found['advised'])}")


if __name__ == "__main__":
    sys.exit(main())
