"""Train one GPT twice, under Megatron's own 1F1B and under a zero-bubble schedule, and compare.

The corpus is the source of the Python standard library, byte by byte. Both runs take the same steps on the same data,
so with ``--zero-bubble-exact`` their losses must be equal to the last bit; the table at the end says so, and what the
schedule did to the bubble.
Timelines, metrics and traces are left in the output folder.
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

from megatron.zero_bubble import SCHEDULES

ROOT = Path(__file__).resolve().parents[1]
NUM_RANKS = 2
# The first iterations allocate and warm caches up.
EXACT = "--zero-bubble-exact"
WARM_UP = 3


@dataclass(frozen=True)
class Run:
    """One training run and where it left its files."""

    title: str
    flags: tuple[str, ...]
    folder: Path

    def metrics(self) -> list[dict[str, Any]]:
        """The training iterations, as dictionaries."""
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [line for line in map(json.loads, lines) if line["kind"] == "train"]

    def trace(self) -> dict[str, Any]:
        """What the last iterations measured."""
        return json.loads((self.folder / "trace.json").read_text(encoding="utf-8"))


def main() -> int:
    """Prepare, train twice, compare."""
    options = _parse()
    output = options.output.resolve()
    corpus = options.data.resolve() / "stdlib"
    _call([sys.executable, str(ROOT / "scripts/prepare_data.py"), "--standard-library", "--output-prefix", str(corpus)])
    baseline = Run("1F1B (stock Megatron)", (), output / "stock")
    if sharing := _shared_gpu():  # stock megatron-core cannot move GPU tensors over gloo; our own 1F1B can
        baseline = Run("1F1B (this package)", ("--zero-bubble-schedule", "1f1b", EXACT), output / "1f1b")
    runs = (
        baseline,
        Run(
            f"{options.schedule} (this package)",
            ("--zero-bubble-schedule", options.schedule, EXACT),
            output / options.schedule,
        ),
    )
    for number, run in enumerate(runs, start=1):
        print(f"\n[{number}/{len(runs)}] {run.title}", flush=True)
        _train(run, options.config, corpus, options.iterations, sharing)
    print(f"\n{_table(runs)}\n")
    print(_verdict(runs))
    for run in runs:
        print(f"timeline, planned above measured: {run.folder / 'timeline.svg'}")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = sorted(name for name in SCHEDULES if name != "1f1b")
    parser.add_argument("--schedule", choices=names, default="zb-h1")
    parser.add_argument("--iterations", type=int, default=40, help="steps of each run")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/gpt_tiny.yaml")
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="folder of the corpus")
    parser.add_argument("--output", type=Path, default=ROOT / "runs/quickstart")
    options = parser.parse_args()
    if options.iterations <= WARM_UP:
        parser.error(f"--iterations must be more than {WARM_UP}, the steps that warm up; got {options.iterations}")
    return options


def _train(run: Run, config: Path, corpus: Path, iterations: int, sharing: list[str]) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "metrics.jsonl").unlink(missing_ok=True)
    data = [part for split in ("train", "valid", "test") for part in (f"--{split}-data-path", f"{corpus}_{split}")]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
    outputs = ["--metrics-file", str(run.folder / "metrics.jsonl"), "--zero-bubble-trace", str(run.folder)]
    flags = ["--config", str(config), *data, "--train-iters", str(iterations), *outputs, *sharing, *run.flags]
    _call([*launcher, str(ROOT / "scripts/pretrain_gpt.py"), *flags])


def _shared_gpu() -> list[str]:
    """With fewer GPUs than ranks, the ranks share them, which NCCL does not do."""
    from megatron.zero_bubble.platforms import select

    platform = select("auto")
    shared = platform.name == "cuda" and platform.device_count() < NUM_RANKS
    return ["--distributed-backend", "gloo"] if shared else []


def _call(command: list[str]) -> None:
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    if code:
        sys.exit(code)


def _table(runs: tuple[Run, ...]) -> str:
    """A row a run: final loss, speed, planned and measured bubble (makespan: the optimizer waits for all ranks)."""
    rows: list[tuple[str, ...]] = [("schedule", "final loss", "tokens/s", "planned bubble", "measured bubble")]
    for run in runs:
        metrics, trace = run.metrics(), run.trace()
        speed = median(step["tokens_per_second"] for step in metrics[WARM_UP:])
        bubbles = (trace[kind]["bubble_rate_makespan"] for kind in ("planned", "measured"))
        rows.append((run.title, f"{metrics[-1]['lm_loss']:.6f}", f"{speed:,.0f}", *(f"{b:.1%}" for b in bubbles)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _verdict(runs: tuple[Run, ...]) -> str:
    first, second = ([(step["lm_loss"], step["grad_norm"]) for step in run.metrics()] for run in runs)
    if first == second:
        return f"The losses and gradient norms of all {len(first)} steps are equal to the last bit."
    step = next(i for i, pair in enumerate(zip(first, second, strict=False), start=1) if pair[0] != pair[1])
    return f"Losses or gradient norms differ from step {step} on: this should not happen, please report it."


if __name__ == "__main__":
    sys.exit(main())
