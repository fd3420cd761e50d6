"""Sharded units of replicas with samples of different lengths on the wall clock: collectives, and on demand.

Replicas of one rank each run microbatches whose passes sleep, as long as their lengths take (``lengths``). The model is
a sequence of units whose weights are shards: the units of the real runtime gather a unit before its F and its B of
every microbatch, one unit ahead, and reduce its gradients after every backward, as fully sharded data parallelism does.
With collectives all replicas take part in each of these; on demand they fetch shards from each other, and meet at the
end of the iteration.

Samples are divided in the ways of the table *on demand* of ``lengths``, which has the simulated ratios. Here they are
computed for the same samples, and measured; both are the time of an iteration over that on demand, all draws together.
Measured are the median of the rounds, and the least, which other load on the machine disturbs less.

    bash scripts/bench.sh on_demand_wall [--replicas 4] [--each 4] [--iteration-ms 1500] [--draws 3] [--rounds 2]
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from bench import ranks
from bench.emulated_compute import timed
from bench.lengths import DATA, DIVISIONS, ON_DEMAND, OnDemandRow, divisions, iteration_time, simulator
from megatron.zero_bubble import LengthCost, Pass, Placement, Schedule
from megatron.zero_bubble.core.costs.lengths import Load
from megatron.zero_bubble.core.ir.passes import BW, F
from megatron.zero_bubble.core.plan import Additions, plan_of
from megatron.zero_bubble.core.plan.shard import Sharding
from megatron.zero_bubble.engine.platforms.streams import Lane, ThreadLane
from megatron.zero_bubble.engine.runtime.groups import Directions
from megatron.zero_bubble.engine.runtime.on_demand import ShardExchange
from megatron.zero_bubble.engine.runtime.shards import Sharder
from megatron.zero_bubble.engine.runtime.transport import Transport
from tests.helpers.emulate.execute import execute
from tests.helpers.emulate.stages import SleepingStage

UNITS = 4
ELEMENTS = 16384
"""Weights per unit, in float32: 64 KiB."""
PUBLISHED = {"SFT long": 1.36, "SFT short": 1.36, "RL": 1.10}
"""The most that arXiv 2601.19362 measured for communication on demand over collectives, by the kind of data."""


def main() -> int:
    """Start the ranks, or run as one of them."""
    options = _parse()
    if not ranks.on_ranks():
        ranks.launch("on_demand_wall", options.replicas, sys.argv[1:])
        return 0
    dist.init_process_group("gloo")
    load = os.getloadavg()[0]
    rows = _measure(options)
    if ranks.is_first():
        _report(options, rows, (load, os.getloadavg()[0]))
    ranks.leave()
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--each", type=int, default=4, help="samples per replica, on average")
    parser.add_argument("--iteration-ms", type=float, default=1500.0, help="simulated time of an iteration on demand")
    parser.add_argument("--draws", type=int, default=3, help="number of times that the samples are drawn")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("runs/bench/on_demand_wall.json"))
    return parser.parse_args()


def _measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    replica, turns, rows = dist.get_rank(), {}, []
    world = dist.group.WORLD
    assert world is not None
    exchange, lane = ShardExchange(world), ThreadLane()
    alone = [dist.new_group([rank]) for rank in range(options.replicas)][replica]
    transport = Transport(Directions.of(alone), ())
    for data in DATA:
        generator = random.Random(1)
        row = OnDemandRow(data, options.replicas, 1, options.each, "1f1b")
        simulated = simulator(row.schedule, row.ranks)
        for draw in range(options.draws):
            replicas = divisions(row, DATA[data].lengths(row.replicas * row.each, generator), simulated)
            times = {how: iteration_time(how, replicas[how], simulated) for how in DIVISIONS}
            scale = options.iteration_ms / times[ON_DEMAND]
            for how in DIVISIONS:
                cost = LengthCost(simulated.cost.linear * scale, simulated.cost.quadratic * scale)
                turns[f"{data} {draw} {how}"] = _turn(
                    replicas[how][replica], cost, transport, lane, exchange, how == ON_DEMAND
                )
                rows.append({"data": data, "draw": draw, "division": how, "simulated_ms": times[how] * scale})
    measured = ranks.interleaved(turns, options.rounds, warm_up=0)
    transport.close()
    exchange.close()
    return [{**row, "rounds_ms": measured[f"{row['data']} {row['draw']} {row['division']}"]} for row in rows]


def in_turn(num_microbatches: int) -> Schedule:
    """One microbatch after the other through all units of the only rank, forward and backward."""
    row = tuple(
        Pass(unit, kind, microbatch)
        for microbatch in range(num_microbatches)
        for kind, units in ((F, range(UNITS)), (BW, reversed(range(UNITS))))
        for unit in units
    )
    return Schedule("in turn", Placement.interleaved(1, UNITS), num_microbatches, (row,))


def _turn(
    loads: Sequence[Load], cost: LengthCost, transport: Transport, lane: Lane, exchange: ShardExchange, on_demand: bool
) -> Callable[[], float]:
    """What runs one iteration of this replica and returns its time in ms, until all replicas have ended."""
    schedule = in_turn(len(loads))
    plan = plan_of(schedule, Additions(sharding=Sharding(unit_microbatches=1)))
    stage = SleepingStage(schedule, cost.passes(schedule.placement, tuple(loads)), (1,))
    chunks = {unit: (_OnDemand if on_demand else _Collective)(unit, exchange) for unit in range(UNITS)}
    sharder = Sharder(lane)
    sharder.keep(chunks)

    def iteration() -> None:
        if on_demand:
            shards = {(unit, 0): chunk.shard for unit, chunk in chunks.items()}
            exchange.publish(shards, dict.fromkeys(shards, torch.float32))
        execute(plan, stage, transport, more=sharder.handlers(None))
        if on_demand:
            exchange.end()

    def turn() -> float:
        with sharder.iteration(chunks):
            return timed(iteration)()

    return turn


class _Collective:
    """The weights and gradients of a unit, by collectives of all replicas; a ``runtime.shards.Chunk``."""

    def __init__(self, unit: int, exchange: ShardExchange) -> None:
        whole, gradients = torch.ones(ELEMENTS), torch.zeros(ELEMENTS)
        self.weights, self.gradients = [whole], [gradients]
        own = exchange.rank
        self.own_weights, self.own_gradients = ([each.view(exchange.size, -1)[own]] for each in (whole, gradients))
        self.shard = self.own_weights[0].clone()
        self._unit, self._exchange = unit, exchange

    def gather(self) -> None:
        """See ``runtime.shards.Chunk``."""
        dist.all_gather(list(self.weights[0].view(self._exchange.size, -1)), self.shard)

    def reduce(self) -> None:
        """See ``runtime.shards.Chunk``."""
        dist.all_reduce(self.gradients[0])


class _OnDemand(_Collective):
    """The same, on demand."""

    def gather(self) -> None:
        """See ``runtime.shards.Chunk``."""
        for replica, part in enumerate(self.weights[0].view(self._exchange.size, -1)):
            if replica != self._exchange.rank:
                self._exchange.fetch((self._unit, 0), replica, part)

    def reduce(self) -> None:
        """See ``runtime.shards.Chunk``."""
        for replica, part in enumerate(self.gradients[0].view(self._exchange.size, -1)):
            self._exchange.add((self._unit, 0), replica, part)


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per data, the ratios of times to those on demand, all draws together: simulated and measured."""
    found = []
    for data in dict.fromkeys(row["data"] for row in rows):
        simulated, measured, least = (dict.fromkeys(DIVISIONS, 0.0) for _ in range(3))
        for row in rows:
            if row["data"] == data:
                simulated[row["division"]] += row["simulated_ms"]
                measured[row["division"]] += median(row["rounds_ms"])
                least[row["division"]] += min(row["rounds_ms"])
        for how in DIVISIONS:
            ratios = {
                "simulated": simulated[how] / simulated[ON_DEMAND],
                "measured": measured[how] / measured[ON_DEMAND],
                "by_least": least[how] / least[ON_DEMAND],
                "measured_over_simulated_ms": least[how] / simulated[how],
            }
            found.append({"data": data, "division": how, **ratios, "published": PUBLISHED[data]})
    return found


def _report(options: argparse.Namespace, rows: list[dict[str, Any]], load: tuple[float, float]) -> None:
    settings = {name: getattr(options, name) for name in ("replicas", "each", "iteration_ms", "draws", "rounds")}
    table = summary(rows)
    content = {"bench": "on_demand_wall", "machine": ranks.machine(), **settings, "load_average": load}
    ranks.write(options.output, {**content, "ratios": table, "rows": rows})
    print(f"load average {load[0]:.1f} before, {load[1]:.1f} after; time over that on demand")
    print("data       division   simulated  measured  by least  least / simulated ms  published, up to")
    for each in table:
        print(
            f"{each['data']:10} {each['division']:10} {each['simulated']:9.2f} {each['measured']:9.2f} "
            f"{each['by_least']:9.2f} {each['measured_over_simulated_ms']:21.3f} {each['published']:17.2f}"
        )


if __name__ == "__main__":
    sys.exit(main())
