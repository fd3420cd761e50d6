"""Gains of schedules over stock Megatron, measured and predicted, on every rank of a pipeline; see ``gains``.

Rank 0 times the layers of its stage alone, and while all others compute. A run under ZB-H1 then records costs, from
which every variant gets its plan and its predicted time: named schedules, what ``zb-auto`` finds in twice the memory of
1F1B, and what ``auto`` decides in that of 1F1B. Stock Megatron and the plans take turns in rounds, in one process per
rank. The time of an iteration is that of the slowest rank, without optimizer and data.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from gpu_day import gpt, mps, step
from gpu_day.gains import CTAS
from megatron.zero_bubble.cli.deciding import COSTS, decided
from megatron.zero_bubble.core.costs import PassCosts
from megatron.zero_bubble.core.formats.costs import CostsFile, costs_to_json
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.engine.measure.gather import gather_trace, median_costs
from megatron.zero_bubble.engine.measure.recorder import Recorder
from megatron.zero_bubble.integration.patching import revert
from megatron.zero_bubble.planning.answer import Answer, answer
from megatron.zero_bubble.planning.figures import Figures, measured
from megatron.zero_bubble.planning.job.arguments.checks import check
from megatron.zero_bubble.planning.job.arguments.parser import parse
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig
from megatron.zero_bubble.planning.plan_file import written
from megatron.zero_bubble.planning.question import Question, of_run
from megatron.zero_bubble.planning.setup import DEFAULT_LIMIT, Named, Setup
from megatron.zero_bubble.planning.source import ZB_AUTO

STOCK, AUTO = "stock", "auto"
NAMED = {name: ZeroBubbleConfig(schedule=name) for name in ("zb-h1", "zb-v")}
NAMED[ZB_AUTO] = ZeroBubbleConfig(schedule=ZB_AUTO, memory_limit="2p")
WARM_UP, MEASURED = 2, 2
"""Iterations of a variant in a round, and for the costs; the first ones connect ranks and load kernels."""


def main() -> int:
    """Measure if other ranks slow this one by no more than is allowed."""
    parser = step.parser(__doc__)
    step.add_sizes(parser)
    parser.add_argument("--num-ranks", type=int, required=True)
    for name in ("batches", "shares"):
        parser.add_argument(f"--{name}", type=int, nargs="+", required=True)
    parser.add_argument("--allowed", type=float, required=True, help="the largest slowdown with which to go on")
    options = parser.parse_args()
    options.num_microbatches = max(options.batches)
    job = gpt.Gpt(options)
    slowed = _check(job, options)
    count = dist.get_world_size()
    gpus = torch.cuda.device_count()
    where = {"num_ranks": count, "ranks_per_gpu": -(-count // gpus) if gpus else 0, "mps": mps.is_used()}
    if slowed["slowdown"] > options.allowed:
        step.write(options.output, {**slowed, **where})
    else:
        with TemporaryDirectory() as own:
            folder = Path(_from_first(own))
            rows = _measured(job, options, _recorded(job, options), folder)
        step.write(options.output, {**slowed, **where, **figures_of(rows), "rows": rows})
    gpt.leave()
    return 0


def _check(job: gpt.Gpt, options: argparse.Namespace) -> dict[str, Any]:
    """Times of the passes of this stage's layers on rank 0, alone and while the others compute."""
    hosts = dist.new_group(backend="gloo")  # waits without a kernel
    is_first = dist.get_rank() == 0
    job.layer_passes_ms(1)
    found = []
    count = 3 * options.rounds
    for rounds in (0, 2 * count):  # of the others, which outlast rank 0
        dist.barrier(group=hosts)
        if is_first or rounds:
            found.append(job.layer_passes_ms(count if is_first else rounds))
        dist.barrier(group=hosts)
    alone, together = _from_first(found)
    on_gpu = options.device == "cuda"
    return {
        "alone_ms": alone,
        "together_ms": together,
        "slowdown": max(together[kind] / alone[kind] for kind in alone) - 1,
        "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count if on_gpu else 0,
    }


def _recorded(job: gpt.Gpt, options: argparse.Namespace) -> PassCosts:
    """Costs of the passes, of a run under ZB-H1."""
    recorder = Recorder(job.platform)
    gpt.under(ZeroBubbleConfig(schedule="zb-h1", nccl_ctas=int(CTAS)), [recorder])
    timelines = []
    try:
        for number in range(WARM_UP + options.rounds):
            recorder.start(job.group)
            job.iteration()
            trace = gather_trace("zb-h1", recorder.stop(), job.group)
            timelines += [trace.timeline] if number >= WARM_UP else []
    finally:
        revert()
    return median_costs(timelines)


def _measured(job: gpt.Gpt, options: argparse.Namespace, costs: PassCosts, folder: Path) -> list[dict[str, Any]]:
    """Run all variants in rounds; return a row for each of them and each number of microbatches."""
    predicted = _from_first(_plan(options, costs, folder) if dist.get_rank() == 0 else None)
    jobs = {Placement.linear(dist.get_world_size()): job}
    times: dict[tuple[int, str], list[float]] = {}
    for _ in range(options.rounds):
        for name in (STOCK, *NAMED, AUTO):
            for count in options.batches:
                options.num_microbatches = count
                file = folder / f"{name}-{count}.json"
                times.setdefault((count, name), []).extend(_iterations_ms(jobs, file, options))
    return rows_of(times, predicted)


def _iterations_ms(jobs: dict[Placement, gpt.Gpt], file: Path, options: argparse.Namespace) -> list[float]:
    """Times of some iterations under the plan in a file; under stock's own schedule without the file."""
    job = next(iter(jobs.values()))
    if file.exists():
        config = ZeroBubbleConfig(schedule_file=str(file), nccl_ctas=int(CTAS))
        placement = config.sources()(dist.get_world_size()).placement
        if placement not in jobs:
            jobs[placement] = gpt.Gpt(options, ["--zero-bubble-schedule", str(file)])
        job = jobs[placement]
        gpt.under(config)
    try:
        return [_iteration_ms(job) for _ in range(WARM_UP + MEASURED)][WARM_UP:]
    finally:
        revert()


def _iteration_ms(job: gpt.Gpt) -> float:
    """The time of the slowest rank; all begin together."""
    dist.barrier()
    job.platform.synchronize()
    began = time.perf_counter()
    job.iteration()
    job.platform.synchronize()
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, 1e3 * (time.perf_counter() - began))
    return float(max(of_ranks))


def _plan(options: argparse.Namespace, costs: PassCosts, folder: Path) -> dict[tuple[int, str], float]:
    """Write the plans of all variants into a folder; return the predicted times by microbatches and name."""
    text, predicted = costs_to_json(costs), {}
    file = CostsFile.parse(text)
    for count in options.batches:
        figures = measured(file, options.num_ranks, count)
        stock = answer(Question(figures, Setup(Named("1f1b"))))
        plans = {name: _answer(config, figures) for name, config in NAMED.items()}
        if (config := _auto(options, count, text, folder / str(count))) is not None:
            plans[AUTO] = _answer(config, figures)
        for name, plan in plans.items():
            (folder / f"{name}-{count}.json").write_text(written(plan), encoding="utf-8")
        for name, plan in {STOCK: stock, AUTO: stock, **plans}.items():
            predicted[count, name] = plan.timeline.makespan_ms
    return predicted


def _answer(config: ZeroBubbleConfig, figures: Figures) -> Answer:
    """The plan of a run with this configuration and these costs."""
    if config.setup.name != ZB_AUTO:
        return answer(Question(figures, Setup(config.setup.order)))
    return answer(of_run(figures, config.setup))


def _auto(options: argparse.Namespace, count: int, costs: str, folder: Path) -> ZeroBubbleConfig | None:
    """What ``--zero-bubble-schedule auto`` decides in the memory of 1F1B; None for the job's own schedule."""
    folder.mkdir()
    (folder / COSTS).write_text(costs, encoding="utf-8")
    options.num_microbatches = count
    job = [*gpt.flags(options), "--pipeline-model-parallel-size", str(options.num_ranks), "--train-iters", "1"]
    own = ["--zero-bubble-schedule", AUTO, "--zero-bubble-memory-limit", DEFAULT_LIMIT, "--load", str(folder)]
    args = parse(decided([*job, *own])[0])
    check(args, options.num_ranks)
    return args.zero_bubble if args.run.has_schedule else None


def rows_of(
    times: Mapping[tuple[int, str], list[float]], predicted: Mapping[tuple[int, str], float]
) -> list[dict[str, Any]]:
    """Medians, and gains over stock, measured and predicted."""
    found = {key: median(of) for key, of in times.items()}
    return [
        {
            "microbatches": count,
            "variant": name,
            "measured_ms": ms,
            "predicted_ms": predicted[count, name],
            "measured": 1 - ms / found[count, STOCK],
            "predicted": 1 - predicted[count, name] / predicted[count, STOCK],
            "times_ms": times[count, name],
        }
        for (count, name), ms in found.items()
    ]


def figures_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The gains with the largest number of microbatches."""
    most = max(row["microbatches"] for row in rows)
    return {
        f"{row['variant'].replace('-', '_')}_{what}": row[what]
        for row in rows
        for what in ("measured", "predicted")
        if row["microbatches"] == most
    }


def _from_first(value: Any) -> Any:
    """What rank 0 has."""
    shared = [value]
    dist.broadcast_object_list(shared, 0)
    return shared[0]


if __name__ == "__main__":
    sys.exit(main())
