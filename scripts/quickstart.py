"""Train one GPT twice, under Megatron's own 1F1B and under a zero-bubble schedule, and compare.

The corpus is the source of the Python standard library, byte by byte. Both runs take the same steps on the same data,
so with ``--zero-bubble-exact`` their losses must be equal to the last bit. The summary at the end shows whether they
are, how much faster the schedule was, and what to try next. The output folder keeps timelines, metrics, traces and
measured costs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megatron.zero_bubble import SCHEDULES, Placement, build

ROOT = Path(__file__).resolve().parents[1]
NUM_RANKS = 2
EXACT = "--zero-bubble-exact"
WARM_UP = 3  # iterations that allocate memory and warm caches
MEASURED_SECONDS = 30  # of a run of 40 iterations of configs/gpt_tiny.yaml, on two cores


@dataclass(frozen=True)
class Run:
    """One training run and the folder of its files."""

    title: str
    flags: tuple[str, ...]
    folder: Path

    def metrics(self) -> list[dict[str, Any]]:
        """Metrics of the training iterations."""
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [line for line in map(json.loads, lines) if line["kind"] == "train"]

    def trace(self) -> dict[str, Any]:
        """The trace of the last iterations."""
        return json.loads((self.folder / "trace.json").read_text(encoding="utf-8"))


def main() -> int:
    """Prepare, train twice, compare."""
    options = _parse()
    print(_announcement(options), flush=True)
    output = options.output.resolve()
    corpus = options.data.resolve() / "stdlib"
    _call([sys.executable, str(ROOT / "scripts/prepare_data.py"), "--standard-library", "--output-prefix", str(corpus)])
    device = _device()
    costs = output / options.schedule / "costs.json"
    runs = (
        Run("1F1B (stock Megatron)", (), output / "stock"),
        Run(
            f"{options.schedule} (this package)",
            ("--zero-bubble-schedule", options.schedule, EXACT, "--zero-bubble-record-costs", str(costs)),
            output / options.schedule,
        ),
    )
    for number, run in enumerate(runs, start=1):
        print(f"\n[{number}/{len(runs)}] {run.title}", flush=True)
        _train(run, options.config, corpus, options.iterations, device)
    print(f"\n{_table(runs)}\n\n{_gain(*runs)}\n{_verdict(runs, options.schedule)}\n")
    print("Timelines, planned above measured:")
    for run in runs:
        print(f"  {run.folder / 'timeline.svg'}")
    print(_next_commands(options.schedule, costs, runs[1].metrics()[-1]["num_microbatches"]))
    return 0


def _announcement(options: argparse.Namespace) -> str:
    """The steps of this script, with their duration if it is known."""
    steps = (
        "prepare a corpus: the source of Python's standard library",
        f"train {options.config.name} for {options.iterations} iterations on {NUM_RANKS} ranks under 1F1B",
        f"train it again under {options.schedule}, on the same data",
        "compare losses, speed and bubble",
    )
    lines = [f"  {number}. {step}" for number, step in enumerate(steps, start=1)]
    seconds = 2 * MEASURED_SECONDS * max(options.iterations, 10) / 40
    known = options.config.name == "gpt_tiny.yaml"
    duration = f", about {seconds:.0f} s on two CPU cores" if known else ""
    return "\n".join((f"Quickstart{duration}:", *lines))


def _next_commands(schedule: str, costs: Path, num_microbatches: int) -> str:
    other = "zb-v" if schedule != "zb-v" else "zb-h1"
    file = os.path.relpath(costs)
    commands = (
        ("another schedule", f"bash scripts/quickstart.sh --schedule {other}"),
        (
            "every schedule at the measured costs",
            f"zero-bubble compare --costs {file} --num-ranks {NUM_RANKS} --num-microbatches {num_microbatches}",
        ),
        ("schedules in a browser", "zero-bubble playground"),
    )
    width = max(len(what) for what, _ in commands) + 1
    lines = [f"  {what + ':':<{width}}  {command}" for what, command in commands]
    return "\n".join(("\nTry next, after `source .venv/bin/activate`:", *lines))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = sorted(name for name in SCHEDULES if name != "1f1b")
    parser.add_argument("--schedule", choices=names, default="zb-h1")
    parser.add_argument("--iterations", type=int, default=40, help="iterations of each run")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/gpt_tiny.yaml")
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="folder of the corpus")
    parser.add_argument("--output", type=Path, default=ROOT / "runs/quickstart")
    options = parser.parse_args()
    if options.iterations <= WARM_UP:
        parser.error(
            f"--iterations must be more than {WARM_UP}, the number of warm-up iterations; got {options.iterations}"
        )
    return options


def _train(run: Run, config: Path, corpus: Path, iterations: int, device: list[str]) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "metrics.jsonl").unlink(missing_ok=True)
    data = [part for split in ("train", "valid", "test") for part in (f"--{split}-data-path", f"{corpus}_{split}")]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
    outputs = ["--metrics-file", str(run.folder / "metrics.jsonl"), "--zero-bubble-trace", str(run.folder)]
    flags = ["--config", str(config), *data, "--train-iters", str(iterations), *outputs, *device, *run.flags]
    _call([*launcher, str(ROOT / "scripts/pretrain_gpt.py"), *flags])


def _device() -> list[str]:
    """Flags for CPU ranks, if there are fewer GPUs than ranks: NCCL does not let ranks share a GPU."""
    from megatron.zero_bubble.engine.platforms import select

    platform = select("auto")
    if platform.name != "cuda" or platform.device_count() >= NUM_RANKS:
        return []
    print(f"Training on CPU ranks, because NCCL needs {NUM_RANKS} GPUs; found {platform.device_count()}.")
    return ["--zero-bubble-device", "cpu"]


def _call(command: list[str]) -> None:
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    if code:
        sys.exit(code)


def _table(runs: tuple[Run, ...]) -> str:
    """One row per run: final loss, speed, planned and measured bubble (makespan: the optimizer waits for all ranks)."""
    rows: list[tuple[str, ...]] = [("schedule", "final loss", "tokens/s", "planned bubble", "measured bubble")]
    for run in runs:
        metrics, trace = run.metrics(), run.trace()
        speed = _speed(run)
        bubbles = (trace[kind]["bubble_rate_makespan"] for kind in ("planned", "measured"))
        rows.append((run.title, f"{metrics[-1]['lm_loss']:.6f}", f"{speed:,.0f}", *(f"{b:.1%}" for b in bubbles)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _speed(run: Run) -> float:
    """Tokens per second of the median iteration after the warm-up."""
    return median(step["tokens_per_second"] for step in run.metrics()[WARM_UP:])


def _gain(baseline: Run, run: Run) -> str:
    before, after = _speed(baseline), _speed(run)
    change = after / before - 1
    comparison = f"{change:.1%} faster than" if change >= 0 else f"{-change:.1%} slower than"
    hint = "" if change > 0 else "; if other programs used these cores, run this again without them"
    return f"{run.title} trained {comparison} {baseline.title}: {after:,.0f} and {before:,.0f} tokens/s{hint}."


def _verdict(runs: tuple[Run, ...], schedule: str) -> str:
    first, second = ([(step["lm_loss"], step["grad_norm"]) for step in run.metrics()] for run in runs)
    if first == second:
        return f"The losses and gradient norms of all {len(first)} iterations are equal to the last bit."
    if build(schedule, num_ranks=NUM_RANKS, num_microbatches=NUM_RANKS).placement != Placement.linear(NUM_RANKS):
        return (
            "The losses differ, as expected: with several stages per rank the same seed draws other initial weights. "
            "From the same checkpoint they are equal (docs/exactness.md)."
        )
    step = next(i for i, pair in enumerate(zip(first, second, strict=False), start=1) if pair[0] != pair[1])
    return f"Losses or gradient norms differ from iteration {step} on: this should not happen, please report it."


if __name__ == "__main__":
    sys.exit(main())
