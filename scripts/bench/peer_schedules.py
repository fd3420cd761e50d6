"""Compare zb-auto with public schedulers: its schedules must never be longer for the same costs in the same memory.

``configs/published/peer_schedules.csv`` has 936 schedules of the authors' fork, of Primus and of DualPipeV, each with
the costs it was made for, its peak memory and its bubble rates. For each, zb-auto plans with the same costs and with
that peak as its memory limit, once for the span and once for the makespan. The table has the medians of each memory
class next to the lower bound. Each ZB-V of a peer is also compared with our ``zb-v``, fitted to the costs as by
``zero-bubble plan``: on a V, in the memory of its pattern.

    bash scripts/bench.sh peer_schedules [--jobs 2] [--sample N] [--peers FILE]

``configs/published/peer_schedules_p32.csv`` has 120 schedules of the authors' fork on 32 ranks.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench import page, ranks
from megatron.zero_bubble import PassCosts, PassMemory, Placement, Schedule, build, simulate
from megatron.zero_bubble.core.analysis.bounds import lower_bound
from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.search import fit, zb_auto

PEERS = ranks.ROOT / "configs/published/peer_schedules.csv"
METRICS: tuple[Metric, ...] = ("span", "makespan")
TOLERANCE = 0.0005
CLASSES = ((0.4, "up to 0.4 p"), (0.7, "0.4 to 0.7 p"), (1.0, "0.7 to 1 p"), (float("inf"), "above 1 p"))
"""Upper ends of the memory classes, as multiples of 1F1B's peak (p microbatches)."""


@dataclass(frozen=True)
class Case:
    """One question: costs of a rank in ms, M_W in units of M_B, and a memory limit in microbatches per rank."""

    p: int
    m: int
    forward_ms: float
    backward_ms: float
    wgrad_ms: float
    comm_ms: float
    wgrad_memory: float
    limit: float

    @property
    def equal_costs(self) -> bool:
        """Whether all passes take the same time and transfers take none, which V-Half and V-Min were made for."""
        return self.forward_ms == self.backward_ms == self.wgrad_ms and self.comm_ms == 0


@dataclass(frozen=True)
class Peer:
    """A public schedule."""

    source: str
    schedule: str
    bubble: dict[str, float]


@dataclass(frozen=True)
class Answer:
    """The result of zb-auto for one objective."""

    bubble: float
    bound: float
    placement: str
    peak: float
    seconds: float


def read(path: Path) -> dict[Case, list[Peer]]:
    """Read the peers' schedules, by the question that they answer."""
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    cases: dict[Case, list[Peer]] = {}
    for row in rows:
        costs = (
            float(row[key]) for key in ("forward_ms", "backward_ms", "wgrad_ms", "comm_ms", "wgrad_memory", "peak")
        )
        peer = Peer(row["source"], row["schedule"], {metric: float(row[f"bubble_{metric}"]) for metric in METRICS})
        cases.setdefault(Case(int(row["p"]), int(row["m"]), *costs), []).append(peer)
    return cases


def answer(case: Case, objective: Metric) -> Answer:
    """Plan, and compute the lower bound for any plan on either placement."""
    return plan(case, objective)[0]


def plan(case: Case, objective: Metric, start: Schedule | None = None) -> tuple[Answer, Schedule]:
    """The answer and its schedule, which is no worse than ``start``."""
    finest = Placement.vee(case.p)
    costs = PassCosts.uniform(finest, case.forward_ms, case.backward_ms, case.wgrad_ms, case.comm_ms)
    memory = PassMemory.uniform(finest, 1.0, case.wgrad_memory)
    started = time.perf_counter()
    schedule = zb_auto(costs, memory, case.p, case.m, case.limit, objective=objective, start=start)
    seconds = time.perf_counter() - started
    fitted = costs.fit(schedule.placement), memory.fit(schedule.placement)
    timeline = simulate(schedule, *fitted)
    peak = max(timeline.peak_activation)
    assert peak <= case.limit + 1e-6, f"{case}: the peak is {peak}"
    shortest = min(
        lower_bound(costs.fit(on), memory.fit(on), Workload(on, case.m), case.limit, objective).value_ms
        for on in (Placement.linear(case.p), finest)
    )
    work = case.m * (case.forward_ms + case.backward_ms + case.wgrad_ms)
    name = "vee" if schedule.placement == finest else "linear"
    found = Answer(timeline.bubble_rate(objective), (shortest - work) / shortest, name, peak, seconds)
    return found, schedule


def zb_v_bubble(case: Case, objective: Metric) -> float:
    """The bubble rate of ``zb-v`` for these costs, in the memory of its pattern."""
    start = build("zb-v", num_ranks=case.p, num_microbatches=case.m)
    on = start.placement
    costs = PassCosts.uniform(on, case.forward_ms, case.backward_ms, case.wgrad_ms, case.comm_ms)
    memory = PassMemory.uniform(on, 1.0, case.wgrad_memory)
    return simulate(fit(start, costs, memory, objective=objective), costs, memory).bubble_rate(objective)


def main() -> int:
    """Answer every question; return 1 if a peer is better beyond the tolerance, or is not beaten where it must be."""
    options = _parse()
    cases = read(options.peers)
    chosen = list(cases)
    if options.sample is not None:
        chosen = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
    answers: dict[tuple[Case, Metric], Answer] = {}
    of_zb_v = [(case, metric) for case in chosen for metric in METRICS if any(is_zb_v(peer) for peer in cases[case])]
    with ProcessPoolExecutor(options.jobs) as pool:
        futures = {pool.submit(answer, case, metric): (case, metric) for case in chosen for metric in METRICS}
        for done, future in enumerate(as_completed(futures), 1):
            answers[futures[future]] = future.result()
            print(f"\r  {done}/{len(futures)}", end="", file=sys.stderr, flush=True)
        bubbles = dict(zip(of_zb_v, pool.map(zb_v_bubble, *zip(*of_zb_v, strict=True)), strict=True))
    print(file=sys.stderr)
    losses = [*lost(cases, answers), *lost_by_zb_v(cases, bubbles)]
    rows = [*_medians(cases, answers)]
    results = [
        {**asdict(case), "objective": metric, "peers": [asdict(peer) for peer in cases[case]], **asdict(found)}
        for (case, metric), found in answers.items()
    ]
    content = {"seed": options.seed, "questions": len(chosen), "of_questions": len(cases)}
    content |= {"schedules": sum(len(cases[case]) for case in chosen), "of_schedules": sum(map(len, cases.values()))}
    content |= {"medians": rows, "lost": losses, "results": results}
    page.report("peers", content, options.output)
    for loss in sorted(losses, key=lambda row: -row["excess"]):
        print(_sentence(loss))
    return int(bool(losses))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--peers", type=Path, metavar="FILE", default=PEERS, help="CSV of the public schedules")
    parser.add_argument("--sample", type=int, metavar="N", help="answer N random questions; default: all questions")
    parser.add_argument("--seed", type=int, default=0, help="random seed of --sample")
    parser.add_argument("--output", type=Path, default=Path("runs/bench/peer_schedules.json"))
    return parser.parse_args()


def lost(cases: dict[Case, list[Peer]], answers: dict[tuple[Case, Metric], Answer]) -> Iterable[dict[str, Any]]:
    """Questions where a peer is better, or as good although its pattern was made for other costs."""
    for (case, metric), found in answers.items():
        for peer in cases[case]:
            excess = found.bubble - peer.bubble[metric]
            patterned = peer.schedule in ("v-half", "v-min") and not case.equal_costs
            if excess > TOLERANCE or (patterned and excess >= -1e-5):
                yield {**asdict(case), "objective": metric, **asdict(peer), "ours": found.bubble, "excess": excess}


def is_zb_v(peer: Peer) -> bool:
    """Whether the peer's schedule is its ZB-V."""
    return peer.schedule == "zbv"


def lost_by_zb_v(cases: dict[Case, list[Peer]], bubbles: dict[tuple[Case, Metric], float]) -> Iterable[dict[str, Any]]:
    """Questions where a peer's ZB-V is better than ours."""
    for (case, metric), bubble in bubbles.items():
        for peer in filter(is_zb_v, cases[case]):
            excess = bubble - peer.bubble[metric]
            if excess > TOLERANCE:
                yield {**asdict(case), "objective": metric, **asdict(peer), "ours": bubble, "excess": excess}


def _medians(cases: dict[Case, list[Peer]], answers: dict[tuple[Case, Metric], Answer]) -> Iterable[dict[str, Any]]:
    for metric in METRICS:
        low = 0.0
        for high, name in CLASSES:
            of_class = [
                (found, min(peer.bubble[metric] for peer in cases[case]))
                for (case, objective), found in answers.items()
                if objective == metric and low < case.limit / case.p <= high
            ]
            low = high
            if of_class:
                yield {
                    "objective": metric,
                    "memory": name,
                    "questions": len(of_class),
                    "ours": median(found.bubble for found, _ in of_class),
                    "ours_quartiles": ranks.quartiles([found.bubble for found, _ in of_class]),
                    "best_peer": median(best for _, best in of_class),
                    "best_peer_quartiles": ranks.quartiles([best for _, best in of_class]),
                    "bound": median(found.bound for found, _ in of_class),
                    "seconds": median(found.seconds for found, _ in of_class),
                }


def _sentence(loss: dict[str, Any]) -> str:
    costs = "/".join(f"{loss[key]:g}" for key in ("forward_ms", "backward_ms", "wgrad_ms", "comm_ms"))
    question = f"p={loss['p']} m={loss['m']} {costs} M_W {loss['wgrad_memory']:g} limit {loss['limit']:g}"
    rate = loss["bubble"][loss["objective"]]
    return (
        f"comparison lost: {loss['objective']} {question}: {loss['schedule']} {rate:.4f}, "
        f"ours {loss['ours']:.4f} ({loss['excess']:+.4f})"
    )


if __name__ == "__main__":
    sys.exit(main())
