"""Emulated compute: the deviation of the runtime from its plan when passes only take time, with real tensors on gloo.

``--clock virtual``: passes do not sleep; every rank keeps a logical clock that travels with the tensors, so that the
execution is compared with the plan exactly, for every schedule, 2, 4 and 8 ranks (up to ``--num-ranks``), 1, P and 3P
microbatches and three ratios of costs, and with both algorithms of vocabulary parallelism. ``--clock wall``: passes
sleep; every round runs one iteration of stock megatron-core, of our schedules and of those of
torch.distributed.pipelining, and the table has the measured over the planned time of each.

    bash scripts/bench.sh emulated_compute --clock virtual
    bash scripts/bench.sh emulated_compute --clock wall [--num-ranks 8] [--num-microbatches 16] [--pass-ms 50]
    bash scripts/bench.sh emulated_compute --clock wall --num-microbatches 8 --measure-transfers --num-chunks 4
    bash scripts/bench.sh emulated_compute --clock wall --pass-ms 50 100 50 --recompute-ms 50
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench import page, ranks

if TYPE_CHECKING:
    from bench.peers import Contestant, Emulation
    from megatron.zero_bubble import Schedule
    from megatron.zero_bubble.core.search.placements import PlacementName

STOCK = "stock 1f1b"
STOCK_INTERLEAVED = "stock interleaved"
OURS = (
    *("1f1b", "interleaved-1f1b", "breadth-first", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe-v"),
    *("seq-1f1b", "seq-zb-h1"),
)
RECOMPUTING = ("1f1b", "zb-h1", "zb-v")
OURS_ON_LOOPS = ("interleaved-1f1b", "gis", "zb-interleaved")
VIRTUAL_RANKS = (2, 4, 8)
VIRTUAL_LIMIT_MS = 0.01
HEAD_START_S = 0.1


def main() -> int:
    """Start the ranks, or run as one of them; return 1 if a pass differs from the plan on the virtual clock."""
    options = _parse()
    if not ranks.on_ranks():
        virtual = options.clock == "virtual"
        ranks.launch("emulated_compute", max(_virtual_ranks(options)) if virtual else options.num_ranks, sys.argv[1:])
        return 0
    import torch.distributed as dist

    from megatron.zero_bubble.engine.platforms import select
    from pretrain.quiet import quiet

    select("cpu").setup(0)
    dist.init_process_group("gloo")
    with quiet():
        result = (_virtual if options.clock == "virtual" else _wall)(options)
    if ranks.is_first():
        path = options.output or Path(f"runs/bench/emulated_compute_{options.clock}.json")
        page.report("virtual" if options.clock == "virtual" else "emulated", result, path)
    ranks.leave()
    return int(options.clock == "virtual" and differs(result["results"]))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--clock", choices=["virtual", "wall"], default="wall")
    parser.add_argument("--kib", type=int, default=256, help="size of every message in KiB")
    parser.add_argument("--rounds", type=int, default=9, help="number of measured rounds (wall)")
    parser.add_argument(
        "--num-ranks", type=int, default=8, help="number of pipeline ranks (wall), or their maximum (virtual)"
    )
    parser.add_argument("--num-microbatches", type=int, default=16, help="number of microbatches (wall)")
    parser.add_argument(
        "--pass-ms",
        type=float,
        nargs="+",
        default=[50.0],
        help="times of F, B and W, or one time for all of them (wall)",
    )
    parser.add_argument(
        "--measure-transfers",
        action="store_true",
        help="measure the time of a message between the ranks first, and plan with it, as with recorded costs; without "
        "it, messages take no time in the plans (wall)",
    )
    parser.add_argument(
        "--num-chunks", type=int, help="compare only schedules with so many stages per rank, and zb-v (wall)"
    )
    parser.add_argument(
        "--recompute-ms",
        type=float,
        default=0.0,
        help="part of the time of B that computes activations again; only schedules with that in B, and in a pass of "
        "its own, are compared (wall)",
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if len(options.pass_ms) not in (1, 3):
        parser.error(f"--pass-ms takes one time or three (F B W); got {len(options.pass_ms)}; leave the others out")
    if not 64 <= options.kib <= 1024:
        parser.error(f"--kib must be from 64 to 1024; got {options.kib}; choose a size in that range")
    if not _virtual_ranks(options):
        parser.error(f"--num-ranks must be {min(VIRTUAL_RANKS)} or more; got {options.num_ranks}; raise it")
    return options


def _virtual_ranks(options: argparse.Namespace) -> list[int]:
    return [num_ranks for num_ranks in VIRTUAL_RANKS if num_ranks <= options.num_ranks]


def _virtual(options: argparse.Namespace) -> dict[str, Any]:
    """Compare every pass of every case with its plan; the same ranks form one pipeline of 8, two of 4, four of 2."""
    import torch.distributed as dist

    from megatron.zero_bubble.engine.runtime.groups import Directions
    from megatron.zero_bubble.engine.runtime.transport import Transport
    from tests.helpers.emulate.execute import virtual_cases, virtual_deviation_ms, virtual_vocabulary_cases
    from tests.helpers.emulate.links import VirtualCollectives

    world, rank = dist.get_world_size(), dist.get_rank()
    rows = []
    for num_ranks in _virtual_ranks(options):
        groups = [dist.new_group(list(range(first, first + num_ranks))) for first in range(0, world, num_ranks)]
        own = groups[rank // num_ranks]
        transport, collectives = Transport(Directions.of(own), ()), VirtualCollectives(own)
        worst: dict[str, tuple[float, str, int]] = {}
        for schedule, costs in chain(virtual_cases(num_ranks), virtual_vocabulary_cases(num_ranks)):
            deviation = virtual_deviation_ms(schedule, costs, transport, collectives, options.kib * 1024 // 8)
            name = f"{schedule.name}, M={schedule.num_microbatches}"
            worst[name] = max(worst.get(name, (0.0, "", 0)), (*deviation, rank))
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, worst)
        rows += [{"num_ranks": num_ranks, "case": name, "worst": max(w[name] for w in everyone)} for name in worst]
    return {"results": rows}


def differs(rows: list[dict[str, Any]]) -> bool:
    """Whether any pass differs from its plan; the first rank prints which and where."""
    apart = [row for row in rows if row["worst"][0] > VIRTUAL_LIMIT_MS]
    for row in apart if ranks.is_first() else ():
        ms, where, at = row["worst"]
        print(f"P={row['num_ranks']}, {row['case']}: {ms:.6f} ms from the plan at {where} on rank {at}")
    return bool(apart)


def _wall(options: argparse.Namespace) -> dict[str, Any]:
    import torch.distributed as dist
    from megatron.core import parallel_state

    from bench.peers import Emulation

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=options.num_ranks)
    forward_ms, backward_ms, wgrad_ms = options.pass_ms if len(options.pass_ms) == 3 else options.pass_ms * 3
    transfer_ms = transfer_time_ms(options.kib) if options.measure_transfers else 0.0
    sizes = options.num_ranks, options.num_microbatches
    of_passes = forward_ms, backward_ms, wgrad_ms
    emulation = Emulation(*sizes, *of_passes, options.kib, transfer_ms, options.recompute_ms)
    contestants = _contestants(emulation, dist.get_rank(), options.num_chunks)
    times = ranks.interleaved({name: timed(c.run) for name, c in contestants.items()}, options.rounds)
    variants = {
        name: {"planned_ms": contestant.planned_ms, "rounds_ms": times[name]}
        for name, contestant in contestants.items()
    }
    settings = {key: getattr(options, key) for key in ("num_ranks", "num_microbatches", "pass_ms", "kib", "rounds")}
    return {**settings, "transfer_ms": transfer_ms, "variants": variants}


def transfer_time_ms(kib: int, rounds: int = 50) -> float:
    """The median time in ms in which a message of ``kib`` KiB reaches the next rank, while all ranks send; the same on
    all ranks.
    """
    import torch
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    sent, received = torch.zeros(kib, 1, 256), torch.empty(kib, 1, 256)
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        pending = dist.isend(sent, (rank + 1) % world)
        dist.recv(received, (rank - 1) % world)
        assert pending is not None
        pending.wait()
        times.append(time.perf_counter() - begun)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, median(times) * 1e3)
    return median(everyone)


def _contestants(emulation: Emulation, rank: int, num_chunks: int | None) -> dict[str, Contestant]:
    """All contestants, ready to run on this rank."""
    import torch.distributed as dist

    from bench import peers
    from megatron.zero_bubble import build
    from megatron.zero_bubble.core.plan import lower
    from megatron.zero_bubble.core.search.recompute import with_recomputation
    from megatron.zero_bubble.engine.runtime.groups import Directions
    from megatron.zero_bubble.engine.runtime.transport import Transport
    from tests.helpers.emulate.execute import execute
    from tests.helpers.emulate.stages import SleepingStage

    assert dist.group.WORLD is not None
    transport = Transport(Directions.of(dist.group.WORLD), ())
    sizes = {"num_ranks": emulation.num_ranks, "num_microbatches": emulation.num_microbatches}

    def ours(schedule: Schedule) -> Contestant:
        costs = emulation.costs(schedule.placement)
        plan, stage = lower(schedule), SleepingStage(schedule, costs, emulation.message_shape)
        transport.open(plan.channels)
        return peers.Contestant(schedule, costs, lambda: execute(plan, stage, transport))

    if emulation.recompute_ms:
        made = {name: build(name, **sizes) for name in RECOMPUTING}
        apart = {f"{name} with R": with_recomputation(schedule) for name, schedule in made.items()}
        return {STOCK: peers.stock(emulation)} | {name: ours(schedule) for name, schedule in (made | apart).items()}
    if num_chunks is not None:
        return {
            STOCK_INTERLEAVED: peers.stock(emulation, num_chunks),
            **{name: ours(build(name, **sizes, num_chunks=num_chunks)) for name in OURS_ON_LOOPS},
            **{f"zb-auto {name}": ours(_searched(emulation, name, num_chunks)) for name in ("loop", "wave")},
            "zb-v": ours(build("zb-v", **sizes)),
            "torch interleaved zb": peers.torch_interleaved_zero_bubble(emulation, rank, num_chunks),
        }
    return {
        STOCK: peers.stock(emulation),
        STOCK_INTERLEAVED: peers.stock(emulation, num_chunks=2),
        **{name: ours(build(name, **sizes)) for name in OURS},
        "torch 1f1b": peers.torch_1f1b(emulation, rank),
        "torch zb1p": peers.torch_zb1p(emulation, rank),
        "torch interleaved zb": peers.torch_interleaved_zero_bubble(emulation, rank),
        "torch zbv": peers.torch_zbv(emulation, rank),
    }


def _searched(emulation: Emulation, placement: PlacementName, num_chunks: int) -> Schedule:
    """The automatic schedule in the memory of 1F1B, if messages take no time."""
    from megatron.zero_bubble import PassMemory, Placement
    from megatron.zero_bubble.core.search import zb_auto

    line = Placement.linear(emulation.num_ranks)
    memory, limit = PassMemory.uniform(line, 1.0, 0.5), min(emulation.num_ranks, emulation.num_microbatches)
    question = emulation.costs(line), memory, emulation.num_ranks, emulation.num_microbatches, limit
    return zb_auto(*question, placement=placement, num_chunks=num_chunks, objective="makespan")


def timed(run: Callable[[], None], before: Callable[[], object] = lambda: None) -> Callable[[], float]:
    """A function that returns the ms from a common start of all ranks, after ``before``, to the end of the last rank.

    All ranks must be on one machine, so that they share one monotonic clock.
    """
    import torch
    import torch.distributed as dist

    from tests.helpers.emulate.clock import sleep_until

    def iteration_ms() -> float:
        before()
        start = torch.tensor(time.perf_counter() + HEAD_START_S, dtype=torch.float64)
        dist.broadcast(start, 0)
        sleep_until(start.item())
        run()
        end = torch.tensor(time.perf_counter(), dtype=torch.float64)
        dist.all_reduce(end, dist.ReduceOp.MAX)
        return (end - start).item() * 1e3

    return iteration_ms


if __name__ == "__main__":
    sys.exit(main())
