"""The memory-bubble frontier: the least bubble that zb-auto finds under every memory limit, next to public schedules.

Eight ranks, 24 microbatches, limits from a third of 1F1B's peak to twice that, in eighths, and the peaks of the public
schedules. One panel for each profile of costs with M_W = M_B in ``configs/published/peer_schedules.csv``: our frontier,
the lower bound and the public schedules.

    bash scripts/bench.sh frontier [--objective span] [--svg docs/frontier.svg]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from html import escape
from pathlib import Path

from bench import peer_schedules, ranks
from bench.peer_schedules import Answer, Case, Metric

P, M = 8, 24
LIMITS = (P / 3, *(P / 3 + P / 8 * step for step in range(1, 14)), 2.0 * P)
WIDTH, HEIGHT, MARGIN, COLUMNS = 420, 280, 50, 2
_LINE, _LETTER = 11, 5.4
"""Height of a label, and about the width of a letter, in pixels."""


@dataclass(frozen=True)
class Point:
    """A peer's schedule: peak memory in microbatches and bubble rate."""

    schedule: str
    peak: float
    bubble: float


@dataclass(frozen=True)
class Panel:
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


def main() -> int:
    """Plan, draw and write; return 1 if a frontier is not monotone."""
    options = _parse()
    panels = list(_panels(options.objective, options.jobs))
    for panel in panels:
        print(f"{panel.title}: {'monotone' if panel.is_monotone else 'NOT MONOTONE'}")
        for limit, answer in zip(panel.limits, panel.found, strict=True):
            found = f"bubble {answer.bubble:.4f}, bound {answer.bound:.4f}, {answer.placement}"
            print(f"  {limit / P:5.3f} of 1F1B: {found}, {answer.seconds:.1f} s")
    options.svg.parent.mkdir(parents=True, exist_ok=True)
    options.svg.write_text(draw(panels, options.objective), encoding="utf-8")
    print(f"drawn in {options.svg}")
    content = {"bench": "frontier", "machine": ranks.machine(), "objective": options.objective}
    ranks.write(options.output, content | {"panels": [asdict(panel) for panel in panels]})
    return int(not all(panel.is_monotone for panel in panels))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--objective", choices=peer_schedules.METRICS, default="span")
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--svg", type=Path, default=Path("runs/bench/frontier.svg"))
    parser.add_argument("--output", type=Path, default=Path("runs/bench/frontier.json"))
    return parser.parse_args()


def _panels(metric: Metric, jobs: int | None) -> Iterator[Panel]:
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
            yield Panel(profile, tried, found, tuple(points))


def _follow(metric: Metric, profile: Case, limits: Sequence[float]) -> tuple[Answer, ...]:
    """The answers for all limits; what fits in less memory fits in more, so each search starts from the one before."""
    found, schedule = [], None
    for limit in limits:
        answer, schedule = peer_schedules.plan(replace(profile, limit=limit), metric, schedule)
        found.append(answer)
    return tuple(found)


def draw(panels: Sequence[Panel], objective: Metric) -> str:
    """Draw all panels as one SVG."""
    rows = -(-len(panels) // COLUMNS)
    size = COLUMNS * WIDTH, rows * HEIGHT + 24
    what = f"Bubble rate ({objective}) over peak activation memory, p={P}, m={M}"
    whose = '<tspan fill="#0a7d38">zb-auto</tspan>, <tspan fill="#888">lower bound</tspan>, public schedules'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" font-family="sans-serif">',
        f'<style>text{{font-size:10px}}</style><rect width="{size[0]}" height="{size[1]}" fill="white"/>',
        f'<text x="{MARGIN}" y="16" style="font-size:13px">{what}: {whose}</text>',
    ]
    for index, panel in enumerate(panels):
        x, y = index % COLUMNS * WIDTH, index // COLUMNS * HEIGHT + 24
        parts.append(f'<g transform="translate({x},{y})">{"".join(_panel(panel))}</g>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel) -> Iterator[str]:
    most = 1.1 * max([point.bubble for point in panel.peers] + [answer.bubble for answer in panel.found])

    def x(peak: float) -> float:
        return MARGIN + (WIDTH - MARGIN - 20) * peak / (2 * P)

    def y(bubble: float) -> float:
        return HEIGHT - MARGIN + 10 - (HEIGHT - MARGIN - 20) * bubble / most

    yield f'<text x="{WIDTH / 2}" y="12" text-anchor="middle">{escape(panel.title)}</text>'
    for step in range(5):
        peak, bubble = P * step / 2, most * step / 4
        yield f'<line x1="{x(peak)}" y1="{y(0)}" x2="{x(peak)}" y2="{y(most)}" stroke="#eee"/>'
        yield f'<text x="{x(peak)}" y="{y(0) + 14}" text-anchor="middle">{step / 2:g} p</text>'
        yield f'<line x1="{x(0)}" y1="{y(bubble)}" x2="{x(2 * P)}" y2="{y(bubble)}" stroke="#eee"/>'
        yield f'<text x="{x(0) - 4}" y="{y(bubble) + 3}" text-anchor="end">{bubble:.0%}</text>'
    for name, color in (("bound", "#888"), ("bubble", "#0a7d38")):
        corners: list[str] = []
        for limit, answer in zip(panel.limits, panel.found, strict=True):
            rate = getattr(answer, name)
            if corners:
                corners.append(f"{x(limit):.1f},{corners[-1].split(',')[1]}")
            corners.append(f"{x(limit):.1f},{y(rate):.1f}")
        yield f'<polyline points="{" ".join(corners)}" fill="none" stroke="{color}" stroke-width="1.5"/>'
    labels: list[tuple[float, float, float]] = []
    for point in sorted(panel.peers, key=lambda point: point.bubble):
        name = escape(point.schedule.split("[")[0].removeprefix("deepseek-"))
        left, top = x(point.peak) + 5, y(point.bubble) - 3
        width = _LETTER * len(name)
        if left + width > WIDTH - 20:
            left -= width + 10
        top = min([top, *(above - _LINE for start, end, above in labels if start < left + width and left < end)])
        labels.append((left, left + width, top))
        yield f'<circle cx="{x(point.peak):.1f}" cy="{y(point.bubble):.1f}" r="3" fill="#c0392b"/>'
        yield f'<text x="{left:.1f}" y="{top:.1f}" fill="#c0392b">{name}</text>'


if __name__ == "__main__":
    sys.exit(main())
