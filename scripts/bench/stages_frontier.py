"""The least bubble under every memory limit, with one, two and four stages per rank: line, V, loops and waves.

Eight ranks; one panel for each number of microbatches and set of costs. With few microbatches, more stages per rank
leave a smaller bubble in the same memory.

    bash scripts/bench.sh stages_frontier [--svg docs/stages-per-rank.svg]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from bench import ranks
from bench.chart import Axis, Line, Panel, draw
from bench.frontier import steps
from megatron.zero_bubble import PassCosts, PassMemory, Placement, simulate
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.search import zb_auto
from megatron.zero_bubble.core.search.placements import PlacementChoice

P, WGRAD_MEMORY = 8, 0.5
LIMITS = tuple(halves / 2 for halves in range(5, 2 * P + 1))
PLACED: dict[str, tuple[PlacementChoice, int | None]] = {
    "one per rank": ("linear", None),
    "two per rank, on a V": ("vee", None),
    "two per rank, on a loop": ("loop", 2),
    "four per rank, on a loop": ("loop", 4),
    "four per rank, in a wave": ("wave", 4),
}


class Setting(NamedTuple):
    """The microbatches of a panel, and its pass and transfer times on one rank, in ms."""

    num_microbatches: int
    forward_ms: float
    backward_ms: float
    wgrad_ms: float
    comm_ms: float

    @property
    def title(self) -> str:
        passes = f"F {self.forward_ms:g}, B {self.backward_ms:g}, W {self.wgrad_ms:g}"
        return f"{self.num_microbatches} microbatches; {passes}, transfer {self.comm_ms:g} ms"


SETTINGS = (
    Setting(P // 2, 12, 12, 12, 0.2),
    Setting(P, 12, 12, 12, 0.2),
    Setting(P, 12, 14, 9, 0.2),
    Setting(2 * P, 12, 12, 12, 0.2),
)


def bubbles(setting: Setting, name: str) -> list[tuple[float, float]]:
    """The bubble rate of the makespan under every limit, in microbatches, that admits a schedule."""
    placement, num_chunks = PLACED[name]
    m, forward, backward, wgrad, comm = setting
    costs = PassCosts.uniform(Placement.linear(P), forward, backward, wgrad, comm)
    memory = PassMemory.uniform(Placement.linear(P), 1.0, WGRAD_MEMORY)
    found, best = [], None
    for limit in LIMITS:
        how = {"placement": placement, "num_chunks": num_chunks, "objective": "makespan", "start": best}
        try:
            best = zb_auto(costs, memory, P, m, limit, **how)  # type: ignore[arg-type]
        except UserError:
            continue  # one microbatch needs more
        makespan = simulate(best, costs.fit(best.placement)).makespan_ms
        found.append((limit, 1 - m * (forward + backward + wgrad) / makespan))
    return found


def panels(jobs: int | None, settings: Sequence[Setting] = SETTINGS) -> Iterator[Panel]:
    """A panel for each setting, with memory in units of 1F1B's peak with many microbatches."""
    with ProcessPoolExecutor(jobs) as pool:
        running = {(s, name): pool.submit(bubbles, s, name) for s in settings for name in PLACED}
        for setting in settings:
            of = {name: running[setting, name].result() for name in PLACED}
            lines = (Line(n, steps([x / P for x, _ in found], [y for _, y in found])) for n, found in of.items())
            yield Panel(setting.title, tuple(lines))


def draw_all(drawn: Sequence[Panel]) -> str:
    """Draw all panels as one SVG."""
    ticks = tuple(quarter / 4 for quarter in range(1, 5))
    x = Axis("memory limit per rank; 1 p: the peak of 1F1B", ticks, tuple(f"{tick:g} p" for tick in ticks))
    y = Axis.shares(
        "bubble rate (makespan)", 0.0, max(rate for p in drawn for line in p.lines for _, rate in line.points)
    )
    legend = {name: name for name in PLACED}
    return draw(f"Bubble rate over memory by stages per rank, {P} ranks", drawn, legend, x, y)


def main() -> int:
    """Plan, draw and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--svg", type=Path, default=Path("runs/bench/stages_frontier.svg"))
    parser.add_argument("--output", type=Path, default=Path("runs/bench/stages_frontier.json"))
    options = parser.parse_args()
    drawn = []
    for panel in panels(options.jobs):
        print(panel.title)
        for line in panel.lines:
            print(f"  {line.name}: {line.points[0][1]:.4f} in {line.points[0][0]:g} p, {line.points[-1][1]:.4f} in 1 p")
        drawn.append(panel)
    options.svg.parent.mkdir(parents=True, exist_ok=True)
    options.svg.write_text(draw_all(drawn), encoding="utf-8")
    print(f"drawn in {options.svg}")
    content = [{"title": panel.title, "lines": {line.name: line.points for line in panel.lines}} for panel in drawn]
    ranks.write(options.output, {"bench": "stages_frontier", "machine": ranks.machine(), "panels": content})
    return 0


if __name__ == "__main__":
    sys.exit(main())
