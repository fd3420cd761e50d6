"""Simulated makespans of microbatches of different lengths: their order, their balance, and communication on demand.

Three tables, all without transfers, with F = B = W per token and attention that takes s / (12 h + s) of F in a sample
of s tokens:

- order: bubbles of one pipeline, for microbatches in random order, in the order of ``megatron.zero_bubble.balance``
  (``best``), and for its own packing (``balance``). ``best`` has the fewest microbatches under the cap, as other loops
  pack them.
- replicas: time of equal counts in random order over that of ``balance``, one sample per microbatch.
- on demand: time of an iteration whose replicas wait for each other in every unit of sharded weights, over that of
  replicas that wait once per iteration, as with communication on demand.

    bash scripts/bench.sh lengths [--batches 60] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import mean

from megatron.zero_bubble import LengthCost, balance, build
from megatron.zero_bubble.core.costs.lengths import Load
from megatron.zero_bubble.planning.balance import load_of, pack
from megatron.zero_bubble.planning.ordering import Simulator

HIDDEN, FIXED_PART = 5120, 1 / 16
ON_DEMAND = "on demand"
DIVISIONS = ("padded", "sorted", "even", ON_DEMAND)
SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v")


@dataclass(frozen=True)
class Data:
    """Lengths of samples as a job has them.

    Attributes:
        longest: the most tokens of a sample.
        draw: draws a length, which is then cut.
    """

    longest: int
    draw: Callable[[random.Random], float]

    def lengths(self, number: int, generator: random.Random) -> list[int]:
        return [min(self.longest, max(64, int(self.draw(generator)))) for _ in range(number)]


DATA = {
    "RL": Data(16384, lambda generator: generator.lognormvariate(math.log(4096), 0.8)),
    "SFT long": Data(65536, lambda generator: math.exp(generator.uniform(math.log(8192), math.log(65536)))),
    "SFT short": Data(8192, lambda generator: generator.lognormvariate(8.2, 1.3)),
}
"""Lengths of reinforcement learning (median 4k), of long instructions (8k to 64k), and of short ones."""


@dataclass(frozen=True)
class OrderRow:
    """A row of the first table; ``most_tokens`` is None with one sample per microbatch.

    Attributes:
        number: samples of the pipeline.
    """

    ranks: int
    data: str
    number: int
    most_tokens: int | None


ORDER_ROWS = (
    OrderRow(4, "RL", 16, None),
    OrderRow(4, "SFT long", 16, None),
    OrderRow(8, "RL", 32, None),
    OrderRow(8, "SFT long", 32, None),
    OrderRow(4, "RL", 32, 16384),
    OrderRow(4, "RL", 64, 16384),
    OrderRow(8, "RL", 64, 16384),
    OrderRow(8, "RL", 64, 32768),
    OrderRow(8, "SFT long", 32, 65536),
)


@dataclass(frozen=True)
class OnDemandRow:
    """A row of the third table.

    Attributes:
        each: samples per replica.
        equal: whether every replica must have this number of samples, as in reinforcement learning.
    """

    data: str
    replicas: int
    ranks: int
    each: int
    schedule: str

    @property
    def equal(self) -> bool:
        return self.data == "RL"


REPLICA_ROWS = (
    *((2, 2, 16, 8192), (2, 4, 16, 8192), (8, 4, 16, 8192), (8, 8, 32, 8192)),
    *((2, 2, 16, 65536), (8, 4, 16, 65536), (8, 4, 8, 65536)),
)
"""Replicas, ranks, samples per replica, and the longest."""


def simulator(name: str, ranks: int, hidden: int = HIDDEN) -> Simulator:
    """Simulates a schedule, without the fixed cost of a microbatch."""
    cost = LengthCost.of_hidden_size(hidden)
    return Simulator(lambda count: build(name, num_ranks=ranks, num_microbatches=count), cost)


def order_row(row: OrderRow, name: str, batches: int) -> dict[str, float]:
    """The mean bubbles of makespan in percent, and numbers of microbatches, of one row and schedule."""
    generator, simulated = random.Random(1), simulator(name, row.ranks)
    cost, found = simulated.cost, []
    for _ in range(batches):
        lengths = DATA[row.data].lengths(row.number, generator)
        given = fewest(lengths, cost, row.most_tokens)
        generator.shuffle(given)
        loads = [load_of(microbatch, lengths) for microbatch in given]
        [own] = balance(
            lengths,
            1,
            row.ranks,
            row.most_tokens or DATA[row.data].longest,
            name,
            LengthCost.of_hidden_size(HIDDEN, FIXED_PART * (row.most_tokens or 0)),
        )
        times = {
            "random": simulated.makespan(loads),
            "best": simulated.best(loads)[0],
            "balance": simulated.makespan([load_of(microbatch, lengths) for microbatch in own]),
        }
        work = sum(map(cost.sample, lengths))
        bubbles = {what: 100.0 * (1.0 - work / time) for what, time in times.items()}
        found.append({**bubbles, "microbatches": len(given), "balance_microbatches": len(own)})
    return {what: round(mean(each[what] for each in found), 1) for what in found[0]}


def fewest(
    lengths: Sequence[int], cost: LengthCost, most_tokens: int | None, at_least: int = 1
) -> list[tuple[int, ...]]:
    """One sample per microbatch, or as few microbatches as the cap allows, but ``at_least`` so many."""
    samples = range(len(lengths))
    if most_tokens is None:
        return [(sample,) for sample in samples]
    number = max(-(-sum(lengths) // most_tokens), min(at_least, len(lengths)))
    while (found := pack(samples, lengths, cost, most_tokens, number)) is None:
        number += 1
    return list(found)


def replica_row(row: tuple[int, int, int, int], name: str, batches: int = 6) -> float:
    """The time of equal counts in random order over that of balanced replicas."""
    replicas, ranks, each, longest = row
    generator, simulated = random.Random(1), simulator(name, ranks, hidden=2048)
    data = Data(longest, lambda generator: generator.lognormvariate(8.2, 1.3))
    before = after = 0.0
    for _ in range(batches):
        lengths = data.lengths(replicas * each, generator)
        equal = [[Load.of([tokens]) for tokens in lengths[replica::replicas]] for replica in range(replicas)]
        balanced = balance(lengths, replicas, ranks, longest, name, simulated.cost)
        before += max(map(simulated.makespan, equal))
        after += max(simulated.makespan([load_of(part, lengths) for part in own]) for own in balanced)
    return round(before / after, 2)


def on_demand_row(row: OnDemandRow, batches: int) -> dict[str, float]:
    """The times of an iteration over that of ``balance`` with communication on demand, from all batches together."""
    generator, simulated, totals = random.Random(1), simulator(row.schedule, row.ranks), dict.fromkeys(DIVISIONS, 0.0)
    for _ in range(batches):
        lengths = DATA[row.data].lengths(row.replicas * row.each, generator)
        for how, replicas in divisions(row, lengths, simulated).items():
            totals[how] += iteration_time(how, replicas, simulated)
    return {how: round(totals[how] / totals[ON_DEMAND], 2) for how in DIVISIONS if how != ON_DEMAND}


def divisions(row: OnDemandRow, lengths: Sequence[int], simulated: Simulator) -> dict[str, list[list[Load]]]:
    """The microbatches of each replica, in the order in which they run, by the ways of dividing samples.

    ``padded``: every sample is a microbatch that is padded to the longest of the iteration. ``sorted`` and ``even``:
    all replicas have equally many packed microbatches. Replicas get their samples as they come (``sorted``), or such
    that microbatches of the same number are alike (``even``). ``on demand``: those of ``balance``.
    """
    cost, longest = simulated.cost, DATA[row.data].longest
    as_given = [lengths[replica :: row.replicas] for replica in range(row.replicas)]
    parts = _equal_numbers(lengths, row.replicas, cost) if row.equal else [lengths]
    own = [
        [load_of(microbatch, of) for microbatch in replica]
        for of in parts
        for replica in balance(of, row.replicas // len(parts), row.ranks, longest, row.schedule, cost)
    ]
    even = _lockstep(parts, cost, longest) if row.equal else _alike(lengths, row.replicas, cost, longest)
    return {
        "padded": [[Load.of([max(lengths)])] * row.each] * row.replicas,
        "sorted": _in_best_order(_lockstep(as_given, cost, longest), simulated),
        "even": _in_best_order(even, simulated),
        ON_DEMAND: own,
    }


def iteration_time(how: str, replicas: Sequence[Sequence[Load]], simulated: Simulator) -> float:
    """The time of the slowest replica on demand; by collectives, microbatches of the same number take as long as the
    longest of them.
    """
    if how == ON_DEMAND:
        return max(map(simulated.makespan, replicas))
    return simulated.makespan(_longest(list(zip(*replicas, strict=True)), simulated.cost))


def _longest(rows: Sequence[Sequence[Load]], cost: LengthCost) -> list[Load]:
    return [max((load for load in row if load.tokens), key=cost.microbatch) for row in rows]


def _in_best_order(rows: Sequence[Sequence[Load]], simulated: Simulator) -> list[list[Load]]:
    """The microbatches of each replica, from those that run at the same time."""
    order = simulated.best(_longest(rows, simulated.cost))[1]
    return [[rows[at][replica] for at in order] for replica in range(len(rows[0]))]


def _lockstep(parts: Sequence[Sequence[int]], cost: LengthCost, most_tokens: int) -> list[tuple[Load, ...]]:
    """The microbatches of each number, if each replica packs its own samples and sorts its microbatches; without tokens
    on a replica that has fewer samples.
    """
    most = max(len(fewest(part, cost, most_tokens)) for part in parts)
    packed = [fewest(part, cost, most_tokens, most) for part in parts]
    rows = [
        sorted((load_of(microbatch, part) for microbatch in own), key=cost.microbatch, reverse=True)
        for part, own in zip(parts, packed, strict=True)
    ]
    return list(zip_longest(*rows, fillvalue=Load(0, 0)))


def _alike(lengths: Sequence[int], replicas: int, cost: LengthCost, most_tokens: int) -> list[tuple[Load, ...]]:
    """The microbatches of each number, if those of the same number are as alike as possible."""
    number = -(-sum(lengths) // (most_tokens * replicas)) * replicas
    while (found := pack(range(len(lengths)), lengths, cost, most_tokens, number)) is None:
        number += replicas
    loads = sorted((load_of(microbatch, lengths) for microbatch in found), key=cost.microbatch, reverse=True)
    return [tuple(loads[at : at + replicas]) for at in range(0, number, replicas)]


def _equal_numbers(lengths: Sequence[int], replicas: int, cost: LengthCost) -> list[list[int]]:
    """Divide samples into parts of equal numbers: neighbours by length go to different parts, the longest of them to
    the part with the least time.
    """
    order = sorted(lengths, reverse=True)
    parts: list[list[int]] = [[] for _ in range(replicas)]
    for first in range(0, len(order), replicas):
        parts.sort(key=lambda part: sum(map(cost.sample, part)))
        for part, tokens in zip(parts, order[first : first + replicas], strict=True):
            part.append(tokens)
    return parts


ON_DEMAND_ROWS = (
    *(OnDemandRow(data, 8, 1, each, "1f1b") for data in ("SFT long", "SFT short", "RL") for each in (2, 4, 8)),
    *(OnDemandRow(data, 8, 4, 16, "zb-h1") for data in ("SFT long", "SFT short", "RL")),
)


def main() -> None:
    """Print all tables and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batches", type=int, default=60, help="iterations per row")
    parser.add_argument("--output", type=Path, default=Path("runs/bench/lengths.json"))
    options = parser.parse_args()
    results: dict[str, list[dict[str, object]]] = {"order": [], "replicas": [], "on demand": []}
    for row in ORDER_ROWS:
        for name in SCHEDULES:
            results["order"].append({**asdict(row), "schedule": name, **order_row(row, name, options.batches)})
    names = ("replicas", "ranks", "each", "longest")
    for figures in REPLICA_ROWS:
        gains = {name: replica_row(figures, name) for name in ("zb-h1", "zb-v")}
        results["replicas"].append({**dict(zip(names, figures, strict=True)), **gains})
    for of in ON_DEMAND_ROWS:
        results["on demand"].append({**asdict(of), **on_demand_row(of, options.batches)})
    for table, rows in results.items():
        print(f"\n{table}")
        for line in rows:
            print("  " + "  ".join(f"{what} {value}" for what, value in line.items()))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
