"""Post-validation: the gain of optimizer steps before the global norm is known, and the cost of undoing a step.

``period``: passes and optimizer steps that only sleep, on the real runtime and gloo: milliseconds from one iteration to
the next under zb-auto with twice the memory of 1F1B, with a synchronous optimizer and with post-validation, next to the
simulator's prediction. ``jobs``: the same for whole training jobs under ZB-H2, in this package's loop and in that of a
Megatron-LM checkout. ``rollback``: time and memory of each way to undo a step.

    bash scripts/bench.sh post_validation period [--num-ranks 8] [--num-microbatches 24] [--pass-ms 50]
    bash scripts/bench.sh post_validation jobs --megatron-lm CHECKOUT [--num-ranks 8] [--pass-ms 100]
    bash scripts/bench.sh post_validation rollback [--elements 16000000]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench import page, ranks

if TYPE_CHECKING:
    from megatron.zero_bubble import PassCosts, Schedule

SYNCHRONOUS, AHEAD = "synchronous", "ahead"
_IN_A_ROW = 3
_KIB = 256


def main() -> int:
    """Run one of the benches; ``period`` starts the ranks, or runs as one of them."""
    options = _parse()
    if options.what == "jobs":
        content = _jobs(options)
        ranks.write(options.output or Path("runs/bench/post_validation_jobs.json"), content)
        for loop, gain in content["gains"].items():
            print(f"{loop}: {gain:+.2%} of the synchronous period (predicted: {content['predicted_gain']:+.2%})")
        return 0
    if options.what == "period" and not ranks.on_ranks():
        ranks.launch("post_validation", options.num_ranks, sys.argv[1:])
        return 0
    content = (_rollback if options.what == "rollback" else _period)(options)
    if ranks.is_first():
        path = options.output or Path(f"runs/bench/post_validation_{options.what}.json")
        page.report("rollback" if options.what == "rollback" else "post-validation", content, path)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=["period", "jobs", "rollback"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-ranks", type=int, default=8)
    parser.add_argument("--num-microbatches", type=int, default=24)
    parser.add_argument("--pass-ms", type=float, default=50.0, help="time of each of F, B and W")
    parser.add_argument("--step-ms", type=float, help="time of the optimizer step; default: half a pass")
    parser.add_argument("--megatron-lm", type=Path, metavar="CHECKOUT", help="a checkout of Megatron-LM (jobs)")
    parser.add_argument("--elements", type=int, default=16_000_000, help="number of parameter elements (rollback)")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if (options.what == "jobs") != (options.megatron_lm is not None):
        parser.error("--megatron-lm is needed for jobs, and only for them")
    options.step_ms = options.pass_ms / 2 if options.step_ms is None else options.step_ms
    return options


def _period(options: argparse.Namespace) -> dict[str, Any]:
    """Measure both optimizers in turn, and predict them with the simulator."""
    import torch.distributed as dist

    from megatron.zero_bubble import PassCosts, PassMemory, Placement
    from megatron.zero_bubble.core.analysis.period import period_ms
    from megatron.zero_bubble.core.search import zb_auto
    from megatron.zero_bubble.engine.platforms import select

    select("cpu").setup(0)
    dist.init_process_group("gloo")
    placement = Placement.linear(options.num_ranks)
    costs, memory = PassCosts.uniform(placement, *[options.pass_ms] * 3), PassMemory.uniform(placement)
    sizes = options.num_ranks, options.num_microbatches
    schedule = zb_auto(costs, memory, *sizes, 2.0 * sizes[0], placement="linear", objective="span")
    times = ranks.interleaved(_iterations(schedule, costs, options.step_ms), options.rounds)
    ranks.leave()
    rows = {
        name: {"predicted_ms": period_ms(schedule, costs, options.step_ms, name == AHEAD), "rounds_ms": values}
        for name, values in times.items()
    }
    settings = {key: getattr(options, key) for key in ("num_ranks", "num_microbatches", "pass_ms", "step_ms", "rounds")}
    return {**settings, "optimizers": rows}


def _iterations(schedule: Schedule, costs: PassCosts, step_ms: float) -> dict[str, Callable[[], float]]:
    """A function per optimizer that runs a few iterations; it returns the ms per iteration on the slowest rank."""
    import torch
    import torch.distributed as dist

    from megatron.zero_bubble.core.plan import communicate, lower, with_validation
    from megatron.zero_bubble.engine.runtime.groups import Directions
    from megatron.zero_bubble.engine.runtime.transport import Transport
    from tests.helpers.emulate.execute import execute
    from tests.helpers.emulate.optimizer import SleepingOptimizer
    from tests.helpers.emulate.stages import SleepingStage

    group = dist.group.WORLD
    assert group is not None
    plan, transport = lower(schedule, (communicate, with_validation)), Transport(Directions.of(group), ())
    transport.open(plan.channels)
    stage = SleepingStage(schedule, costs, (_KIB * 256,))

    def run(optimizer: SleepingOptimizer) -> float:
        dist.barrier()
        ends = []
        for _ in range(_IN_A_ROW):
            execute(plan, stage, transport, optimizer.validate)
            optimizer.step()
            ends.append(time.perf_counter())
        optimizer.settle()
        slowest = torch.tensor((ends[-1] - ends[0]) / (len(ends) - 1), dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item() * 1e3

    return {name: partial(run, SleepingOptimizer(step_ms, name == AHEAD, group)) for name in (SYNCHRONOUS, AHEAD)}


_MODEL = """
    --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1
    --train-iters 11 --lr 1e-3 --min-lr 1e-4 --mock-data --tokenizer-type NullTokenizer --vocab-size 64
    --make-vocab-size-divisible-by 8 --split 99,1,0 --eval-iters 0 --eval-interval 1000 --log-interval 1
    --position-embedding-type rope --clip-grad 100 --untie-embeddings-and-output-weights --attention-dropout 0
    --hidden-dropout 0 --zero-bubble-schedule zb-h2 --zero-bubble-device cpu
"""
_OF_MEGATRON_LM = """
    --transformer-impl local --distributed-backend gloo --no-rope-fusion --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-persist-layer-norm --attention-backend unfused --num-workers 0
    --rerun-mode disabled
"""


def _jobs(options: argparse.Namespace) -> dict[str, Any]:
    """Run both loops with both optimizers in turn; the period is that of the slowest rank."""
    sizes = f"--pipeline-model-parallel-size {options.num_ranks} --num-layers {options.num_ranks}"
    flags = f"{_MODEL} {sizes} --global-batch-size {options.num_microbatches}"
    own, theirs = str(ranks.ROOT / "scripts/pretrain_gpt.py"), str(options.megatron_lm / "pretrain_gpt.py")
    loops = {"own": ("own", own, flags), "Megatron-LM": ("launcher", theirs, f"{flags} {_OF_MEGATRON_LM}")}
    paced = [str(options.pass_ms), str(options.num_microbatches)]

    def period(how: str, script: str, flags: str, more: list[str]) -> float:
        run = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(options.num_ranks)]
        command = [sys.executable, "-m", *run, "--module", "bench.paced", *paced, how, script, *flags.split(), *more]
        environment = ranks.environment() | {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        text = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        return max(float(ms) for ms in re.findall(r"paced: ([\d.]+)", text))

    modes: dict[str, list[str]] = {SYNCHRONOUS: [], AHEAD: ["--zero-bubble-post-validation"]}
    variants: dict[str, Callable[[], float]] = {
        f"{loop}, {mode}": partial(period, *of_loop, more)
        for loop, of_loop in loops.items()
        for mode, more in modes.items()
    }
    times = ranks.interleaved(variants, options.rounds, warm_up=0)
    gains = {loop: median(times[f"{loop}, {AHEAD}"]) / median(times[f"{loop}, {SYNCHRONOUS}"]) - 1 for loop in loops}
    settings = {key: getattr(options, key) for key in ("num_ranks", "num_microbatches", "pass_ms", "rounds")}
    results = {"rounds_ms": times, "gains": gains, "predicted_gain": _predicted_gain(options)}
    return {"bench": "jobs", "machine": ranks.machine(), **settings, **results}


def _predicted_gain(options: argparse.Namespace) -> float:
    """The simulator's gain of post-validation under ZB-H2 with equal passes and a step that takes no time."""
    from megatron.zero_bubble import PassCosts, build
    from megatron.zero_bubble.core.analysis.period import period_ms

    schedule = build("zb-h2", num_ranks=options.num_ranks, num_microbatches=options.num_microbatches)
    costs = PassCosts.uniform(schedule.placement, *[options.pass_ms] * 3)
    ahead, synchronous = (period_ms(schedule, costs, 0.0, of_ahead) for of_ahead in (True, False))
    return ahead / synchronous - 1


def _rollback(options: argparse.Namespace) -> dict[str, Any]:
    """Measure a step of AdamW, and the time and memory of both ways to undo it."""
    import torch

    from megatron.zero_bubble.engine.optimizer.rollback import ROLLBACKS
    from megatron.zero_bubble.engine.platforms import select

    platform = select("auto")
    device = platform.setup(0)
    weights = [torch.nn.Parameter(torch.randn(options.elements // 16, device=device)) for _ in range(16)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.AdamW(weights, lr=1e-4, betas=(0.9, 0.95))
    optimizer.step()

    def timed(work: Callable[[], object]) -> float:
        platform.synchronize()
        begin = platform.mark()
        work()
        return platform.elapsed_ms(begin, platform.mark())

    rows: dict[str, dict[str, float]] = {}
    rounds: dict[str, list[dict[str, float]]] = {}
    for name, make in ROLLBACKS.items():
        rollback, taken = make([optimizer]), []
        for _ in range(options.rounds + 1):
            kept: dict[str, float] = {"check_ms": timed(rollback.is_safe), "keep_ms": timed(rollback.keep)}
            kept["bytes_per_element"] = rollback.num_bytes / options.elements
            kept["step_ms"] = timed(optimizer.step)
            kept["undo_ms"] = timed(rollback.undo)
            taken.append(kept)
        rounds[name] = taken[1:]
        rows[name] = {key: median(row[key] for row in rounds[name]) for key in taken[0]}
    settings = {"device": platform.describe(), "elements": options.elements, "rounds": options.rounds}
    return {**settings, "rollbacks": rows, "by_round": rounds}


if __name__ == "__main__":
    sys.exit(main())
