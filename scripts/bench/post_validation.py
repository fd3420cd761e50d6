"""Post-validation: what stepping ahead of the global norm gains, and what taking a step back costs.

``period``: passes and optimizer steps that only take time, on the real runtime and gloo: milliseconds from one
iteration to the next under zb-auto in twice the memory of 1F1B, with a synchronous optimizer and with steps taken
ahead, beside what the simulator predicts. ``rollback``: what each way of taking a step back costs and keeps.

    bash scripts/bench.sh post_validation period [--num-ranks 8] [--num-microbatches 24] [--pass-ms 50]
    bash scripts/bench.sh post_validation rollback [--elements 16000000]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from bench import ranks

SYNCHRONOUS, AHEAD = "synchronous", "ahead"
_IN_A_ROW = 3
_KIB = 256


def main() -> int:
    """Run one of the two; ``period`` starts the ranks, or is one of them."""
    options = _parse()
    result: dict[str, Any] | None
    if options.what == "rollback":
        result = _rollback(options)
    elif not ranks.on_ranks():
        ranks.launch("post_validation", options.num_ranks, sys.argv[1:])
        return 0
    else:
        result = _period(options)
    if result:
        path = options.output or Path(f"runs/bench/post_validation_{options.what}.json")
        ranks.write(path, {"bench": f"post_validation {options.what}", "machine": ranks.machine()} | result)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=["period", "rollback"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-ranks", type=int, default=8)
    parser.add_argument("--num-microbatches", type=int, default=24)
    parser.add_argument("--pass-ms", type=float, default=50.0, help="of F, B and W")
    parser.add_argument("--step-ms", type=float, help="of the optimizer step; default: half a pass")
    parser.add_argument("--elements", type=int, default=16_000_000, help="of the parameters (rollback)")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    options.step_ms = options.pass_ms / 2 if options.step_ms is None else options.step_ms
    return options


def _period(options: argparse.Namespace) -> dict[str, Any] | None:
    """Both optimizers in turn; None on all ranks but the first."""
    import torch
    import torch.distributed as dist

    from megatron.zero_bubble import PassCosts, PassMemory, Placement, simulate
    from megatron.zero_bubble.analysis.period import period_ms
    from megatron.zero_bubble.emulate.execute import execute
    from megatron.zero_bubble.emulate.optimizer import SleepingOptimizer
    from megatron.zero_bubble.emulate.stages import SleepingStage
    from megatron.zero_bubble.plan import lower, with_validation
    from megatron.zero_bubble.platforms import select
    from megatron.zero_bubble.runtime.transport import Transport
    from megatron.zero_bubble.search import zb_auto

    select("cpu").setup(0)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    placement = Placement.linear(options.num_ranks)
    costs, memory = PassCosts.uniform(placement, *[options.pass_ms] * 3), PassMemory.uniform(placement)
    sizes = options.num_ranks, options.num_microbatches
    schedule = zb_auto(costs, memory, *sizes, 2.0 * sizes[0], placement="linear", objective="span")
    plan, transport = with_validation(lower(schedule)), Transport(group, ())
    transport.open(plan.channels)
    shape = (_KIB * 256,)
    stage, like = SleepingStage(schedule, costs, shape), torch.empty(shape)

    def variant(ahead: bool) -> Callable[[], float]:
        optimizer = SleepingOptimizer(options.step_ms, ahead, group)

        def run() -> float:
            dist.barrier()
            ends = []
            for _ in range(_IN_A_ROW):
                execute(plan, stage, transport, like, optimizer.validate)
                optimizer.step()
                ends.append(time.perf_counter())
            optimizer.settle()
            slowest = torch.tensor((ends[-1] - ends[0]) / (len(ends) - 1), dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            return slowest.item() * 1e3

        return run

    times = ranks.interleaved({SYNCHRONOUS: variant(False), AHEAD: variant(True)}, options.rounds)
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank:
        return None
    timeline = simulate(schedule, costs)
    predicted = {name: period_ms(schedule, costs, options.step_ms, name == AHEAD) for name in times}
    gains = [sync / ahead for sync, ahead in zip(times[SYNCHRONOUS], times[AHEAD], strict=True)]
    print(
        f"\nP={sizes[0]}, M={sizes[1]}, {options.pass_ms:g} ms a pass, {options.step_ms:g} ms a step, zb-auto 2p: span "
        f"{timeline.span_ms:.0f} ms, makespan {timeline.makespan_ms:.0f} ms; medians of {options.rounds} rounds"
    )
    print("  optimizer     predicted ms   measured ms   measured/predicted   noise")
    rows = {}
    for name, values in times.items():
        measured = median(values)
        rows[name] = {"predicted_ms": predicted[name], "measured_ms": measured, "rounds_ms": values}
        print(
            f"  {name:<12}  {predicted[name]:12.1f}  {measured:12.1f}  {measured / predicted[name]:19.3f}"
            f"  {ranks.spread(values):6.1%}"
        )
    gain = predicted[SYNCHRONOUS] / predicted[AHEAD]
    print(f"  gain: {median(gains):.3f}, predicted {gain:.3f}")
    settings = {key: getattr(options, key) for key in ("num_ranks", "num_microbatches", "pass_ms", "step_ms", "rounds")}
    return {**settings, "gain": median(gains), "predicted_gain": gain, "optimizers": rows}


def _rollback(options: argparse.Namespace) -> dict[str, Any]:
    """A step of AdamW, then what the two ways take and keep."""
    import torch

    from megatron.zero_bubble.optimizer.rollback import ROLLBACKS
    from megatron.zero_bubble.platforms import select

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
            kept["bytes_when_none_is_in_flight"] = rollback.num_bytes
            taken.append(kept)
        rounds[name] = taken[1:]
        rows[name] = {key: median(row[key] for row in rounds[name]) for key in taken[0]}
    print(
        f"{options.elements:,} elements on {platform.describe()}, AdamW with fp32 states, medians of {options.rounds}"
    )
    print("  rollback   step ms   check ms   keep ms   undo ms   bytes/element   when none is in flight")
    for name, row in rows.items():
        print(
            f"  {name:<8}  {row['step_ms']:8.2f}  {row['check_ms']:9.2f}  {row['keep_ms']:8.2f}  {row['undo_ms']:8.2f}"
            f"  {row['bytes_per_element']:14.2f}  {row['bytes_when_none_is_in_flight']:23.0f}"
        )
    settings = {"device": platform.describe(), "elements": options.elements, "rounds": options.rounds}
    return {**settings, "rollbacks": rows, "by_round": rounds}


if __name__ == "__main__":
    sys.exit(main())
