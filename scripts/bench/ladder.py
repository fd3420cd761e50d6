"""Steady in p: whether the bubble stays as small when the pipeline, its microbatches and its memory grow together.

For each profile of costs in ``configs/published``, zb-auto plans for 4 to 128 ranks with a fixed number of microbatches
and a fixed memory limit per rank of the pipeline. The bubble may not grow by more than the lower bound does and half a
point: not from one number of ranks to the next, and not from the smallest. A limit is left out where it admits no
schedule.

    bash scripts/bench.sh ladder [--jobs 2] [--profiles 18.5/18.1/9.3/0.6/1] [--num-ranks 4 ... 128]
        [--multiples 2 4] [--limits 1/3 ... 2] [--objective makespan]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import groupby, product
from pathlib import Path

from bench import peer_schedules, ranks
from bench.chart import Axis, Line, Panel, draw
from bench.peer_schedules import Answer, Case, Metric
from megatron.zero_bubble.core.errors import UserError

PEERS = (peer_schedules.PEERS, peer_schedules.PEERS.with_name("peer_schedules_p32.csv"))
TOLERANCE = 0.005


@dataclass(frozen=True)
class Ladder:
    """What stays the same for all numbers of ranks: a profile of costs, microbatches and memory limit over ranks."""

    profile: str
    multiple: int
    limit: Fraction

    def case(self, num_ranks: int) -> Case:
        """The planning problem for ``num_ranks``."""
        f, b, w, comm, wgrad_memory = map(float, self.profile.split("/"))
        limit = float(self.limit * num_ranks)
        return Case(num_ranks, self.multiple * num_ranks, f, b, w, comm, wgrad_memory, limit)


@dataclass(frozen=True)
class Rung:
    """The answer for one number of ranks."""

    ladder: Ladder
    num_ranks: int
    answer: Answer


@dataclass(frozen=True)
class Violation:
    """Two rungs of a ladder between which the bubble grows more than it may."""

    low: Rung
    high: Rung

    @property
    def excess(self) -> float:
        """The growth of the bubble less the growth of the bound; a bound that falls does not count."""
        of, to = self.low.answer, self.high.answer
        return to.bubble - of.bubble - max(0.0, to.bound - of.bound)

    def __str__(self) -> str:
        ladder, of, to = self.high.ladder, self.low, self.high
        return (
            f"{ladder.profile}, m = {ladder.multiple}p, limit {ladder.limit} p, p = {of.num_ranks} to {to.num_ranks}: "
            f"bubble {of.answer.bubble:.2%} to {to.answer.bubble:.2%}, bound {of.answer.bound:.2%} to "
            f"{to.answer.bound:.2%}, {100 * self.excess:.2f} points beyond the bound's growth"
        )


def main() -> int:
    """Plan every rung, draw and write; return 1 if a bubble grows more than it may."""
    options = _parse()
    ladders = [Ladder(*of) for of in product(options.profiles, options.multiples, sorted(options.limits))]
    rungs = list(_climb(ladders, sorted(options.num_ranks), options.objective, options.jobs))
    violations = sorted(violations_of(rungs), key=lambda violation: -violation.excess)
    for ladder, of in groupby(rungs, key=lambda rung: rung.ladder):
        figures = (f"p={at.num_ranks} {at.answer.bubble:.1%} ({at.answer.bound:.1%})" for at in of)
        print(f"{ladder.profile} m={ladder.multiple}p limit {ladder.limit} p: {', '.join(figures)}")
    for violation in violations:
        print(f"not steady: {violation}")
    print(f"{len(violations)} violations on {len(ladders)} ladders with {len(rungs)} plans")
    content = {"bench": "ladder", "machine": ranks.machine(), "objective": options.objective, "tolerance": TOLERANCE}
    content |= {"rungs": [_flat(rung) for rung in rungs]}
    content |= {"violations": [{"what": str(found), "excess": found.excess} for found in violations]}
    ranks.write(options.output, content)
    chart = options.output.with_suffix(".svg")
    chart.write_text(chart_of(rungs, options.objective), encoding="utf-8")
    print(f"drawn to {chart}")
    return int(bool(violations))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--profiles", nargs="+", metavar="F/B/W/COMM/M_W", choices=profiles(), default=profiles(),
        help="profiles of costs: times in ms, and M_W in units of M_B; default: all of configs/published",
    )  # fmt: skip
    parser.add_argument("--num-ranks", type=_count, nargs="+", default=[2**k for k in range(2, 8)])
    parser.add_argument("--multiples", type=_count, nargs="+", default=[2, 4], help="microbatches per rank")
    parser.add_argument(
        "--limits", type=Fraction, nargs="+", default=[Fraction(x) for x in ("1/3", "1/2", "3/4", "1", "3/2", "2")],
        help="memory limits, in the activations of p microbatches",
    )  # fmt: skip
    parser.add_argument("--objective", choices=peer_schedules.METRICS, default="span")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="number of processes")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/bench/ladder.json"), help="results; the chart is written next to it"
    )
    return parser.parse_args()


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more; got {count}")
    return count


def profiles() -> list[str]:
    """The profiles of costs of the public schedules, as F, B, W and transfer in ms and M_W, with slashes between."""
    cases = [case for path in PEERS for case in peer_schedules.read(path)]
    figures = ((c.forward_ms, c.backward_ms, c.wgrad_ms, c.comm_ms, c.wgrad_memory) for c in cases)
    return ["/".join(f"{figure:g}" for figure in of) for of in dict.fromkeys(figures)]


def _climb(ladders: Sequence[Ladder], sizes: Sequence[int], metric: Metric, jobs: int) -> Iterator[Rung]:
    """All rungs that admit a schedule, ladder by ladder; planned largest first, to keep all processes busy."""
    asked = sorted(product(ladders, sizes), key=lambda at: at[0].multiple * at[1] ** 2, reverse=True)
    with ProcessPoolExecutor(jobs) as pool:
        futures = {pool.submit(_answer, ladder.case(p), metric): (ladder, p) for ladder, p in asked}
        for done, _ in enumerate(as_completed(futures), 1):
            print(f"\r  {done}/{len(futures)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    answers = {at: future.result() for future, at in futures.items()}
    for at in product(ladders, sizes):
        if (answer := answers[at]) is not None:
            yield Rung(*at, answer)


def _answer(case: Case, metric: Metric) -> Answer | None:
    try:
        return peer_schedules.answer(case, metric)
    except UserError:  # the limit admits no schedule
        return None


def violations_of(rungs: Sequence[Rung]) -> Iterator[Violation]:
    """Neighbours of a ladder, and its first rung with each other one, between which the bubble grows too much."""
    for _, of in groupby(rungs, key=lambda rung: rung.ladder):
        first, *others = of
        low = first
        for high in others:
            pairs = [Violation(low, high)] if low is first else [Violation(low, high), Violation(first, high)]
            yield from (pair for pair in pairs if pair.excess > TOLERANCE)
            low = high


def _flat(rung: Rung) -> dict[str, object]:
    ladder = {"profile": rung.ladder.profile, "multiple": rung.ladder.multiple, "limit": str(rung.ladder.limit)}
    return {**ladder, "num_ranks": rung.num_ranks, **asdict(rung.answer)}


def chart_of(rungs: Sequence[Rung], metric: Metric) -> str:
    """One panel per profile and multiple: bubble and bound over ranks, one colour per memory limit."""
    limits = sorted({rung.ladder.limit for rung in rungs})
    panels = []
    for (profile, multiple), of in groupby(rungs, key=lambda rung: (rung.ladder.profile, rung.ladder.multiple)):
        *times, wgrad_memory = profile.split("/")
        title = "F {}, B {}, W {}, transfer {} ms".format(*times)
        lines: list[Line] = []
        for limit, at_limit in groupby(of, key=lambda rung: str(rung.ladder.limit)):
            found = list(at_limit)
            lines.append(Line(limit, tuple((rung.num_ranks, rung.answer.bound) for rung in found), is_dashed=True))
            lines.append(Line(limit, tuple((rung.num_ranks, rung.answer.bubble) for rung in found)))
        panels.append(Panel(f"{title}, M_W {wgrad_memory}, m = {multiple}p", tuple(lines)))
    legend = {str(limit): f"memory limit {limit} p" for limit in limits}
    x = Axis.counts("ranks p", sorted({rung.num_ranks for rung in rungs}))
    y = Axis.shares(f"bubble rate ({metric})", 0.0, max(rung.answer.bubble for rung in rungs))
    return draw("zb-auto over the number of ranks; dashed: lower bound", panels, legend, x, y)


if __name__ == "__main__":
    sys.exit(main())
