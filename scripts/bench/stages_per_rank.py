"""Compare automatic schedules with several stages per rank to all others, for random settings.

    bash scripts/bench.sh stages_per_rank 200

draws as many settings (2 to 16 ranks, 1 to 4p microbatches, 2 to 6 stages per rank, costs, memory, limits) and prints
one line for each: the length with one stage per rank or a V, with a loop and with a wave, each with its gap to the
lower bound. No result on a loop may be longer than a named schedule that fits in the same memory, none may exceed the
limit, and none be below the bound: every such case is printed, and the exit status is then 1.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from megatron.zero_bubble import PassCosts, PassMemory, Placement, Schedule, simulate, validate
from megatron.zero_bubble.core.analysis.bounds import lower_bound
from megatron.zero_bubble.core.analysis.memory import most_kept
from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.schedules import breadth_first, gis, gis_h, interleaved, zb_interleaved, zero_pp
from megatron.zero_bubble.core.search import zb_auto
from megatron.zero_bubble.core.search.placements import PlacementChoice, placements

_NAMED = (interleaved, breadth_first, gis, gis_h, zb_interleaved, zero_pp)
_SLACK = 1 + 1e-9


@dataclass(frozen=True)
class Setting:
    """One question: sizes, costs and memory per rank, limit in microbatches, and objective."""

    p: int
    m: int
    v: int
    costs: PassCosts
    memory: PassMemory
    limit: float
    objective: Metric

    def ms(self, schedule: Schedule) -> float:
        timeline = simulate(schedule, self.costs.fit(schedule.placement))
        return timeline.span_ms if self.objective == "span" else timeline.makespan_ms

    def fits(self, schedule: Schedule, slack: float) -> bool:
        memory = self.memory.fit(schedule.placement)
        timeline = simulate(schedule, self.costs.fit(schedule.placement), memory)
        return max(most_kept(timeline, memory)) <= self.limit * slack

    def search(self, placement: PlacementChoice, num_chunks: int | None) -> Schedule:
        question = self.costs, self.memory, self.p, self.m, self.limit
        return zb_auto(*question, placement=placement, num_chunks=num_chunks, objective=self.objective)

    def bound(self, on: Placement) -> float:
        figures = self.costs.fit(on), self.memory.fit(on)
        return lower_bound(*figures, Workload(on, self.m), self.limit, self.objective, effort=0).value_ms


def random_setting(seed: int) -> Setting:
    """Draw a setting; half of them have at most one microbatch per rank."""
    rng = random.Random(seed)
    p = rng.randint(2, 16)
    m, v = rng.randint(1, 4 * p), rng.randint(2, 6)
    if rng.random() < 0.5:
        m = min(m, p)
    forward = rng.uniform(5, 20)
    times = forward, forward * rng.uniform(0.8, 1.6), forward * rng.uniform(0.4, 1.3)
    comm = rng.choice((0.0, 0.2, 0.2, 1.0, forward / v * rng.random()))
    kept = rng.choice((1.0, 0.6, 0.3, 1.0))
    limit = max(1.0, rng.choice((p, p, 1.5 * p, 2 * p, 0.5 * p + 1, m, p / 3 + 1)))
    line = Placement.linear(p)
    costs, memory = PassCosts.uniform(line, *times, comm), PassMemory.uniform(line, 1.0, kept)
    return Setting(p, m, v, costs, memory, limit, rng.choice(("span", "makespan")))


def longer_than_named(setting: Setting, ms: float) -> Iterator[str]:
    """Yield the named schedules on the loop that fit in memory and are shorter than ``ms``."""
    for module in _NAMED:
        schedule = module.build(setting.p, setting.m, setting.v)
        if setting.fits(schedule, _SLACK) and ms > setting.ms(schedule) * _SLACK:
            yield f"{schedule.name} takes {setting.ms(schedule):.3f} ms"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("count", type=int, help="number of settings")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="seed of the first setting (default: 0)")
    options = parser.parse_args()
    failures, gains = 0, []
    for seed in range(options.first, options.first + options.count):
        setting = random_setting(seed)
        today = setting.ms(setting.search("auto", None))
        line, shortest = f"{seed}: p={setting.p} m={setting.m} v={setting.v} today {today:.2f}", today
        shapes: tuple[PlacementChoice, ...] = ("loop", "wave") if setting.v % 2 == 0 else ("loop",)
        for shape in shapes:
            (on,) = placements(shape, setting.p, setting.v)
            schedule = setting.search(shape, setting.v)
            validate(schedule)
            ms, bound = setting.ms(schedule), setting.bound(on)
            wrong = list(longer_than_named(setting, ms)) if shape == "loop" else []
            wrong += [] if setting.fits(schedule, 1 + 1e-6) else ["it exceeds the memory limit"]
            wrong += [] if bound <= ms * _SLACK else [f"it is below the bound {bound:.3f}"]
            failures += len(wrong)
            line += f", {shape} {ms:.2f} (gap {(ms - bound) / ms:.2%})" + "".join(f" WRONG: {each}" for each in wrong)
            shortest = min(shortest, ms)
        if setting.m <= setting.p and setting.p >= 4:
            gains.append(1 - shortest / today)
        print(line, flush=True)
    gain = f"{median(gains):.2%}" if gains else "none"
    print(f"{failures} wrong of {options.count}; median gain at m <= p, p >= 4: {gain} ({len(gains)} settings)")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
