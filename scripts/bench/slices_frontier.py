"""The memory-bubble frontier of sequence slices: the least bubble that zb-auto finds with each number of slices.

Eight ranks and eight microbatches, within one microbatch to eight of them; each panel has another share of attention.
More memory admits every schedule of less, so a line is a step that never rises.

    bash scripts/bench.sh slices_frontier [--svg docs/slices-frontier.svg]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import accumulate, product
from pathlib import Path

from bench import ranks
from bench.chart import Axis, Line, Panel, draw
from bench.frontier import steps
from megatron.zero_bubble import PassCosts, PassMemory, Placement, simulate
from megatron.zero_bubble.core.analysis.score import Goal
from megatron.zero_bubble.core.costs.cuts import default_cuts
from megatron.zero_bubble.planning.cuts import search
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.setup import Cuts

P, M = 8, 8
NUMBERS = (1, 2, 4, 8)
SHARES = (0.0, 0.3)
LIMITS = tuple(quarters / 4 for quarters in range(4, 4 * M + 1))
LEGEND = {
    f"{number}": "whole sequences" if number == 1 else f"{number} slices per sequence" for number in reversed(NUMBERS)
}


def main() -> int:
    """Plan, draw and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--svg", type=Path, default=Path("runs/bench/slices_frontier.svg"))
    parser.add_argument("--output", type=Path, default=Path("runs/bench/slices_frontier.json"))
    options = parser.parse_args()
    cases = list(product(SHARES, NUMBERS))
    with ProcessPoolExecutor(options.jobs) as pool:
        rates = dict(zip(cases, pool.map(bubbles, *zip(*cases, strict=True)), strict=True))
    options.svg.parent.mkdir(parents=True, exist_ok=True)
    options.svg.write_text(_drawn(rates), encoding="utf-8")
    rows = [{"attention": share, "num_slices": number, "bubbles": rates[share, number]} for share, number in cases]
    ranks.write(options.output, {"bench": "slices_frontier", "limits": LIMITS, "results": rows})
    print(f"drawn in {options.svg}")
    return 0


def bubbles(share: float, number: int) -> tuple[float, ...]:
    """The bubble of the makespan within each limit, on the better of both placements."""
    figures = Figures(P, M, partial(_costs, share))
    slices = default_cuts(_costs(share, _LINEAR)[0], number)
    found = []
    for limit in LIMITS:
        schedule = search(figures, "auto", Goal(limit=limit), Cuts(among=(slices,)))
        found.append(simulate(schedule, _costs(share, schedule.placement)[0]).bubble_rate("makespan"))
    return tuple(accumulate(found, min))


def _drawn(rates: Mapping[tuple[float, int], Sequence[float]]) -> str:
    limits = [limit / P for limit in LIMITS]
    panels = [
        Panel(
            f"attention {share:.0%} of F",
            tuple(Line(str(number), steps(limits, rates[share, number])) for number in NUMBERS),
        )
        for share in SHARES
    ]
    ticks = tuple(eighths / 8 for eighths in range(1, 9))
    x = Axis("memory per rank; 1 p: the peak of 1F1B", ticks, tuple(f"{tick:g}" for tick in ticks))
    y = Axis.shares("bubble rate (makespan)", 0.0, max(map(max, rates.values())))
    return draw(f"Bubble rate over memory, {P} ranks, {M} microbatches, with and without slices", panels, LEGEND, x, y)


def _costs(share: float, placement: Placement) -> tuple[PassCosts, PassMemory]:
    """A product of matrices takes equally long in F, B and W, and attention twice as long in B as in F."""
    costs = PassCosts.uniform(placement, 10.0, 10.0 * (1 + share), 10.0 * (1 - share), attention=share)
    return costs, PassMemory.uniform(placement)


_LINEAR = Placement.linear(P)

if __name__ == "__main__":
    sys.exit(main())
