"""Predicted scaling: the throughput of each schedule with 2 to 256 ranks, from pass times and link figures.

Weak scaling at a fixed global batch: every rank has as many layers as in the configuration, so its passes take the same
time with any number of ranks, and a pipeline without bubbles would process the same number of tokens per second at any
size. Pass times come from a costs file (recorded by a run, or published), or are estimated from the model's shapes.
Every schedule of every size is simulated pass by pass; nothing is extrapolated.

Published schedules are made for equal passes. Others are planned for the pass times: ``zb-auto`` in the memory of 1F1B,
and V-Half and V-Min fitted, in their own memory. Each is planned once per size and optimizer, up to ``--plan-up-to``
ranks times microbatches. The largest fitted schedules take minutes and about 2 GiB per process, so ``--planned`` takes
what an earlier run planned from its results, such as ``docs/scaling.json``.

    bash scripts/bench.sh scaling [--config FILE [--gpu NAME]] [--costs FILE] [--latency-us US --link-gbs GBS]
        [--num-ranks 2 ... 256] [--num-microbatches 256 2048] [--plan-up-to N] [--planned FILE]
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median

from bench import page, ranks
from bench.chart import Axis, Line, Panel, draw
from megatron.zero_bubble import Kind, PassCosts, PassMemory, Placement, Schedule, build
from megatron.zero_bubble.cli.model_config import read_model
from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.core.costs.devices import DEVICES
from megatron.zero_bubble.core.costs.estimate import estimate
from megatron.zero_bubble.core.costs.model import Model
from megatron.zero_bubble.core.formats.costs import read_costs_file
from megatron.zero_bubble.core.formats.files import json_object, read_file
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.schedules import recipe
from megatron.zero_bubble.core.search import fit, zb_auto
from megatron.zero_bubble.core.search.loops import loops
from megatron.zero_bubble.core.search.problem import Problem

FITTED = "-fitted"
PUBLISHED = ("1f1b", "interleaved-1f1b", "breadth-first", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min")
PLANNED = ("zb-auto", *(f"{name}{FITTED}" for name in ("zb-v", "v-half", "v-min")))
DRAWN = (
    *("1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min"),
    *("v-half-fitted", "v-min-fitted", "zb-auto"),  # in ZB-V's memory, zb-auto is the fitted ZB-V or shorter
)
OPTIMIZERS: dict[Metric, str] = {"makespan": "synchronous optimizer", "span": "post-validation"}


@dataclass(frozen=True)
class Setting:
    """Times in ms of a rank's passes of one microbatch and of a transfer between neighbours; tokens per microbatch."""

    forward_ms: float
    backward_ms: float
    wgrad_ms: float
    comm_ms: float
    tokens: int

    @property
    def ideal_tokens_s(self) -> float:
        """Tokens per second of a pipeline without bubbles."""
        return self.tokens / (self.forward_ms + self.backward_ms + self.wgrad_ms) * 1e3


@dataclass(frozen=True)
class Point:
    """One schedule at one size: its length, bubble rate and tokens per second of the whole pipeline, by optimizer.

    It took ``seconds`` to build or plan, and to simulate.
    """

    schedule: str
    num_ranks: int
    num_microbatches: int
    ms: dict[Metric, float]
    bubble: dict[Metric, float]
    tokens_s: dict[Metric, float]
    seconds: float


Task = tuple[str, tuple[int, int]]
"""A schedule's name, and its numbers of ranks and of microbatches."""


def main() -> None:
    """Simulate, write and draw."""
    options = _parse()
    try:
        setting, assumptions = _setting(options)
        known = _known(options.planned, setting) if options.planned else {}
    except ValueError as error:
        sys.exit(f"scaling.py: {error}")
    sizes = [*product(options.num_ranks, options.num_microbatches)]
    asked = [*product(options.schedules, sizes)]
    tasks = [
        (name, size)
        for name, size in asked
        if name in PUBLISHED or (name, size) in known or math.prod(size) <= options.plan_up_to
    ]
    points = _predict_all(setting, tasks, known, options.jobs)
    points.sort(key=lambda at: (at.num_microbatches, options.schedules.index(at.schedule), at.num_ranks))
    left_out = _left_out(set(asked) - set(tasks))
    content = {
        "setting": asdict(setting),
        "ideal_tokens_s": setting.ideal_tokens_s,
        "assumptions": [*assumptions, *_planned(options.schedules), *left_out],
        "memory": {name: _memory(name) for name in options.schedules},
        "points": [asdict(point) for point in points],
    }
    page.report("scaling", content, options.output)
    chart = options.output.with_suffix(".svg")
    chart.write_text(chart_of(points, setting, left_out), encoding="utf-8")
    print(f"drawn to {chart}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    configs = ranks.ROOT / "configs"
    parser.add_argument(
        "--config", default=str(configs / "gpt_28.3b.yaml"), help="configuration of the model and its layers per rank"
    )
    parser.add_argument("--gpu", choices=tuple(DEVICES), default="a100", help="GPU for the estimate and the links")
    parser.add_argument("--costs", type=Path, help="costs file with pass times, instead of the estimate")
    parser.add_argument(
        "--latency-us", type=float, help="latency of a transfer between neighbours (default: the GPU's)"
    )
    parser.add_argument("--link-gbs", type=float, help="bandwidth between neighbours in GB/s (default: the GPU's)")
    parser.add_argument("--num-ranks", type=int, nargs="+", default=[2**k for k in range(1, 9)])
    parser.add_argument("--num-microbatches", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--schedules", nargs="+", choices=(*PUBLISHED, *PLANNED), default=list(DRAWN))
    parser.add_argument(
        "--plan-up-to", type=int, metavar="N", default=256 * 2048,
        help="plan zb-auto and fitted schedules only for up to N ranks times microbatches (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--planned", type=Path, metavar="FILE", help="results of an earlier run; what it planned is not planned again"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="number of processes")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/bench/scaling.json"), help="results; the chart is written next to it"
    )
    options = parser.parse_args()
    if (least := min(*options.num_ranks, *options.num_microbatches)) < 1:
        parser.error(f"--num-ranks and --num-microbatches must be 1 or more; got {least}; leave it out")
    return options


def _setting(options: argparse.Namespace) -> tuple[Setting, list[str]]:
    """The setting of a rank that is neither first nor last, and the assumptions in sentences."""
    model, *_ = read_model(options.config, None, flash=True)
    f, b, w = _times(options, model)
    device = DEVICES[options.gpu]
    latency_ms = device.latency_ms if options.latency_us is None else options.latency_us / 1e3
    link_gbs = device.link_gbs if options.link_gbs is None else options.link_gbs
    setting = Setting(f, b, w, latency_ms + model.message_bytes / (link_gbs * 1e6), model.tokens)
    source = f"estimated for {device}" if options.costs is None else f"from {_shown(options.costs)}"
    layers = sorted(model.layers)[len(model.layers) // 2]
    share = f"{layers} layers of {_shown(Path(options.config))} (hidden size {model.hidden})"
    transfer = f"{1e3 * latency_ms:.0f} us and {model.message_bytes / 1e6:.1f} MB at {link_gbs:g} GB/s"
    return setting, [
        f"Weak scaling: every rank holds {share}, so the model grows with the ranks.",
        f"One pipeline and one global batch for all sizes of the pipeline; {model.tokens} tokens per microbatch.",
        f"F {f:.3f}, B {b:.3f} and W {w:.3f} ms per microbatch on every rank, {source}.",
        "Embedding, output layer and loss take no time.",
        f"A transfer takes {transfer}, {setting.comm_ms:.3f} ms, between any two neighbours, and occupies no rank.",
        "An iteration takes the makespan with a synchronous optimizer, else the span; steps take no time.",
        "Data parallelism and its reductions are not counted.",
        "Published schedules are those for passes of equal length; those on a V have two stages per rank.",
    ]


def _times(options: argparse.Namespace, model: Model) -> tuple[float, float, float]:
    """F, B and W of a typical rank: the median over ranks."""
    placement = Placement.linear(len(model.layers))
    if options.costs is None:
        costs, _ = estimate(model, DEVICES[options.gpu], placement)
    else:
        costs, _ = read_costs_file(options.costs).on(placement)
    return median(costs.forward_ms), median(costs.backward_ms), median(costs.wgrad_ms)


def _shown(path: Path) -> str:
    return str(path.resolve().relative_to(ranks.ROOT) if path.resolve().is_relative_to(ranks.ROOT) else path)


def _planned(names: Sequence[str]) -> Iterator[str]:
    """What is planned, in a sentence for each."""
    if "zb-auto" in names:
        yield "zb-auto is planned for these times, in the memory of 1F1B."
    if fitted := [name for name in names if name.endswith(FITTED)]:
        yield f"{' and '.join(fitted)}: fitted to these times, in the memory of the published schedule."
    if set(PLANNED) & set(names):
        yield "Each of these is planned twice: for the makespan and for the span."


def _left_out(tasks: Iterable[Task]) -> list[str]:
    """A sentence about the sizes that are not planned, if there are any."""
    sizes = sorted({size for _, size in tasks})
    named = ", ".join(f"{m} microbatches on {p} ranks" for p, m in sizes)
    return [f"Not planned or fitted, as it takes too long: {named}."] if sizes else []


def _memory(name: str) -> str:
    return recipe("1f1b" if name == "zb-auto" else name.removesuffix(FITTED)).memory


def _known(path: Path, setting: Setting) -> dict[Task, Point]:
    content = read_file(path, "results of an earlier run", json_object)
    if content["setting"] != asdict(setting):
        raise ValueError(f"{path} must be of the same setting; it has {content['setting']}; leave out --planned")
    points = [Point(**row) for row in content["points"] if row["schedule"] in PLANNED]
    return {(point.schedule, (point.num_ranks, point.num_microbatches)): point for point in points}


def _predict_all(setting: Setting, tasks: Sequence[Task], known: Mapping[Task, Point], jobs: int) -> list[Point]:
    """The points of all tasks, in any order; the longest tasks start first, so that all processes end together."""
    points = [known[task] for task in tasks if task in known]
    to_do = sorted(set(tasks) - set(known), key=lambda task: (task[0] in PLANNED, math.prod(task[1])), reverse=True)
    with ProcessPoolExecutor(jobs) as pool:
        futures = [pool.submit(predict, setting, *task) for task in to_do]
        for done, future in enumerate(as_completed(futures), 1):
            point = future.result()
            size = f"{point.num_ranks} ranks, {point.num_microbatches} microbatches"
            print(f"  {done}/{len(to_do)} {point.schedule}, {size}: {point.seconds:.1f} s", file=sys.stderr, flush=True)
            points.append(point)
    return points


def predict(setting: Setting, name: str, size: tuple[int, int]) -> Point:
    """Predict schedule ``name`` with ``size``, the numbers of ranks and of microbatches."""
    started = time.perf_counter()
    num_ranks, num_microbatches = size
    figures = setting.forward_ms, setting.backward_ms, setting.wgrad_ms, setting.comm_ms
    costs = PassCosts.uniform(Placement.vee(num_ranks), *figures)
    if name in PLANNED:
        ms = {metric: lengths_ms(_plan(name, size, costs, metric), costs)[metric] for metric in OPTIMIZERS}
    else:
        schedule = build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
        ms = lengths_ms(schedule, PassCosts.uniform(schedule.placement, *figures))
    work = num_microbatches * sum(figures[:3])
    tokens = num_microbatches * setting.tokens
    return Point(
        name,
        num_ranks,
        num_microbatches,
        ms,
        {metric: (length - work) / length for metric, length in ms.items()},
        {metric: tokens / length * 1e3 for metric, length in ms.items()},
        time.perf_counter() - started,
    )


def _plan(name: str, size: tuple[int, int], costs: PassCosts, metric: Metric) -> Schedule:
    """Plan ``zb-auto`` in the memory of 1F1B, or fit a published schedule, for ``costs`` on a V."""
    num_ranks, num_microbatches = size
    memory = PassMemory.uniform(Placement.vee(num_ranks))
    if name == "zb-auto":
        return zb_auto(costs, memory, num_ranks, num_microbatches, float(num_ranks), objective=metric)
    published = build(name.removesuffix(FITTED), num_ranks=num_ranks, num_microbatches=num_microbatches)
    return fit(published, costs, memory, objective=metric)


def lengths_ms(schedule: Schedule, costs: PassCosts) -> dict[Metric, float]:
    """Makespan and span of a schedule, as of ``simulate``, by the search's compiled loop: fast for millions of passes.

    The loop supports only B and W: if all backwards are fused, B takes the time of both, and W takes none.

    Raises:
        ValueError: the schedule has fused and split backwards, or its microbatches change their order in a stage.
    """
    kinds = {p.kind for p in schedule.passes()}
    if Kind.BW in kinds:
        if Kind.B in kinds:
            raise ValueError(f"backwards must be all fused or all split; {schedule.name} has both; use simulate()")
        both = tuple(b + w for b, w in zip(costs.backward_ms, costs.wgrad_ms, strict=True))
        costs = PassCosts(costs.forward_ms, both, (0.0,) * costs.num_stages, costs.comm_ms, costs.links)
    on = schedule.placement
    rows, lengths = None, {}
    for metric in OPTIMIZERS:
        unlimited = (math.inf,) * schedule.num_ranks
        problem = Problem.of(Workload(on, schedule.num_microbatches), costs, PassMemory.uniform(on), unlimited, metric)
        loop = loops(problem)
        rows = loop.pack(problem.rows(schedule)) if rows is None else rows
        lengths[metric] = loop.evaluate(rows)[0]
    return lengths


def chart_of(points: list[Point], setting: Setting, caption: Sequence[str]) -> str:
    """One panel per optimizer and number of microbatches: throughput, as a share of the ideal, over ranks."""
    sizes = sorted({point.num_microbatches for point in points})
    panels = [
        Panel(f"{m} microbatches, {optimizer}", tuple(_lines(points, m, metric)))
        for m, (metric, optimizer) in product(sizes, OPTIMIZERS.items())
    ]
    title = f"Predicted throughput over pipeline ranks; 100 % is {setting.ideal_tokens_s:,.0f} tokens/s"
    names = _names(points)
    legend = {name.removesuffix(FITTED): f"{name.removesuffix(FITTED)}, memory {_memory(name)}" for name in names}
    for name in filter(lambda name: f"{name}{FITTED}" in names, names):
        legend[name] += ", solid if fitted, dashed if not"
    x = Axis.counts("pipeline ranks", sorted({point.num_ranks for point in points}))
    y = Axis.shares("throughput", 1 - max(max(point.bubble.values()) for point in points), 1.0)
    return draw(title, panels, legend, x, y, caption)


def _names(points: list[Point]) -> list[str]:
    return list(dict.fromkeys(point.schedule for point in points))


def _lines(points: list[Point], num_microbatches: int, metric: Metric) -> Iterator[Line]:
    names = _names(points)
    for name in names:
        of = [p for p in points if (p.schedule, p.num_microbatches) == (name, num_microbatches)]
        shares = tuple((point.num_ranks, 1 - point.bubble[metric]) for point in of)
        yield Line(name.removesuffix(FITTED), shares, is_dashed=f"{name}{FITTED}" in names)


if __name__ == "__main__":
    main()
