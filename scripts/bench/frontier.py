"""The memory-bubble frontier: the least bubble that zb-auto finds under every memory limit, next to public schedules.

Eight ranks, 24 microbatches; limits at every half microbatch from three eighths of 1F1B's peak to twice that peak, and
at the peaks of the public schedules. One panel for each profile of costs with M_W = M_B in
``configs/published/peer_schedules.csv``. A limit between two of these admits no more than the lower one, so the line
is a step: each bubble holds up to the next limit. No public schedule may lie below the line as it is drawn.

    bash scripts/bench.sh frontier [--objective span] [--svg docs/frontier.svg]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from bench import peer_schedules, ranks
from bench.chart import Axis, Dot, Line, Panel, draw
from bench.peer_schedules import TOLERANCE, Answer, Case, Metric

P, M = 8, 24
LIMITS = tuple(halves / 2 for halves in range(6, 4 * P + 1))
LEGEND = {"bound": "lower bound", "peer": "public schedules at their peaks", "zb-auto": "zb-auto within the limit"}


@dataclass(frozen=True)
class Point:
    """A peer's schedule: peak memory in microbatches and bubble rate."""

    schedule: str
    peak: float
    bubble: float


@dataclass(frozen=True)
class Frontier:
    """One cost profile: the answers of zb-auto at each limit, and the points of the peers."""

    case: Case
    limits: tuple[float, ...]
    found: tuple[Answer, ...]
    peers: tuple[Point, ...]

    @property
    def title(self) -> str:
        case = self.case
        return f"F {case.forward_ms:g}, B {case.backward_ms:g}, W {case.wgrad_ms:g}, transfer {case.comm_ms:g} ms"

    @property
    def is_monotone(self) -> bool:
        """Whether more memory never means a larger bubble."""
        bubbles = [answer.bubble for answer in self.found]
        return bubbles == sorted(bubbles, reverse=True)

    @property
    def panel(self) -> Panel:
        """What is drawn, with memory in units of 1F1B's peak."""
        limits = [limit / P for limit in self.limits]
        bound = Line("bound", steps(limits, [answer.bound for answer in self.found]), is_dashed=True)
        line = Line("zb-auto", steps(limits, [answer.bubble for answer in self.found]))
        dots = (Dot("peer", _short(peer.schedule), peer.peak / P, peer.bubble) for peer in self.peers)
        return Panel(self.title, (bound, line), tuple(dots))


def main() -> int:
    """Plan, draw and write; return 1 if a frontier is not monotone or a peer lies below it."""
    options = _parse()
    frontiers = list(_frontiers(options.objective, options.jobs))
    wrong = []
    for frontier in frontiers:
        print(f"{frontier.title}: {'monotone' if frontier.is_monotone else 'NOT MONOTONE'}")
        for limit, answer in zip(frontier.limits, frontier.found, strict=True):
            found = f"bubble {answer.bubble:.4f}, bound {answer.bound:.4f}, {answer.placement}"
            print(f"  {limit / P:5.3f} of 1F1B: {found}, {answer.seconds:.1f} s")
        wrong += below(frontier.panel)
    options.svg.parent.mkdir(parents=True, exist_ok=True)
    options.svg.write_text(draw_all(frontiers, options.objective), encoding="utf-8")
    print(f"drawn in {options.svg}")
    content = {"bench": "frontier", "machine": ranks.machine(), "objective": options.objective}
    ranks.write(options.output, content | {"panels": [asdict(frontier) for frontier in frontiers], "below": wrong})
    for sentence in wrong:
        print(sentence)
    return int(bool(wrong) or not all(frontier.is_monotone for frontier in frontiers))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--objective", choices=peer_schedules.METRICS, default="span")
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--svg", type=Path, default=Path("runs/bench/frontier.svg"))
    parser.add_argument("--output", type=Path, default=Path("runs/bench/frontier.json"))
    return parser.parse_args()


def _frontiers(metric: Metric, jobs: int | None) -> Iterator[Frontier]:
    cases = peer_schedules.read(peer_schedules.PEERS)
    of_size = {case: found for case, found in cases.items() if (case.p, case.m) == (P, M)}
    profiles = sorted({replace(case, limit=0.0) for case in of_size if case.wgrad_memory == 1}, key=str)
    limits = [
        tuple(sorted({*LIMITS, *(case.limit for case in of_size if replace(case, limit=0.0) == profile)}))
        for profile in profiles
    ]
    with ProcessPoolExecutor(jobs) as pool:
        results = pool.map(partial(_follow, metric), profiles, limits)
        for profile, tried, found in zip(profiles, limits, results, strict=True):
            points = (
                Point(peer.schedule, case.limit, peer.bubble[metric])
                for case, listed in of_size.items()
                for peer in listed
                if replace(case, limit=0.0) == profile
            )
            yield Frontier(profile, tried, found, tuple(points))


def _follow(metric: Metric, profile: Case, limits: Sequence[float]) -> tuple[Answer, ...]:
    """The answers for all limits; what fits in less memory fits in more, so each search starts from the one before."""
    found, schedule = [], None
    for limit in limits:
        answer, schedule = peer_schedules.plan(replace(profile, limit=limit), metric, schedule)
        found.append(answer)
    return tuple(found)


def steps(limits: Sequence[float], rates: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """The corners of a line that keeps each limit's rate up to the next limit."""
    corners = [(limits[0], rates[0])]
    for (_, rate), (limit, next_rate) in pairwise(zip(limits, rates, strict=True)):
        corners += [(limit, rate), (limit, next_rate)]
    return tuple(corners)


def below(panel: Panel) -> list[str]:
    """A sentence for each peer that lies below zb-auto's line as it is drawn."""
    corners = next(line.points for line in panel.lines if line.name == "zb-auto")
    sentences = []
    for dot in panel.dots:
        height = [rate for limit, rate in corners if limit <= dot.x + 1e-9][-1]
        if dot.y < height - TOLERANCE:
            sentences.append(
                f"{panel.title}: {dot.label} has a bubble of {dot.y:.2%} in {dot.x:.3f} p, below zb-auto's {height:.2%}"
            )
    return sentences


def draw_all(frontiers: Sequence[Frontier], objective: Metric) -> str:
    """Draw all frontiers as one SVG."""
    panels = [frontier.panel for frontier in frontiers]
    ticks = tuple(quarter / 4 for quarter in range(1, 9))
    x = Axis("memory per rank; 1 p: the peak of 1F1B", ticks, tuple(f"{tick:g} p" for tick in ticks))
    rates = [rate for panel in panels for line in panel.lines for _, rate in line.points]
    rates += [dot.y for panel in panels for dot in panel.dots]
    y = Axis.shares(f"bubble rate ({objective})", 0.0, max(rates))
    return draw(f"Bubble rate over memory, {P} ranks, {M} microbatches", panels, LEGEND, x, y)


def _short(schedule: str) -> str:
    return schedule.split("[", maxsplit=1)[0].removeprefix("deepseek-")


if __name__ == "__main__":
    sys.exit(main())
