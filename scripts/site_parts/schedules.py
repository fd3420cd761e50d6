"""Tables of the schedules, computed by the planning library."""

from __future__ import annotations

import csv
from pathlib import Path

from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.core.render.svg import render_svg
from megatron.zero_bubble.core.schedules import SCHEDULES, build
from megatron.zero_bubble.planning.source import ZB_AUTO
from site_parts.markdown import code, table

_ROOT = Path(__file__).parent.parent.parent
_PROFILES = _ROOT / "configs/published/zero_bubble_table5.csv"
_RANKS, _MICROBATCHES = 4, 12
_DRAWN = "1f1b", "zb-h1", "zb-v"
_FIRST = "zb-h1", "zb-h2", "zb-v", "v-half"
_PUBLISHED = "6.2B", "8", "24"
_WHEN = {
    "1f1b": "baseline: the order of stock Megatron",
    "interleaved-1f1b": "baseline: Megatron's virtual pipeline, backwards not split",
    "zb-h1": "first step: memory, messages and placement of 1F1B",
    "zb-h2": "memory to spare: about twice 1F1B's activations; add post-validation",
    "zb-v": "no memory to spare, F, B and W of similar length, fast links",
    "zb-interleaved": "jobs with a virtual pipeline: change nothing else",
    "v-half": "too little memory for 1F1B: about half of its activations with many ranks",
    "v-min": "the least memory: about a third of 1F1B's activations with many ranks",
    "dualpipe-v": "comparison only: ZB-V is within about 1 % of its makespan, with a shorter span and less memory",
    "seq-zb-h1": "long sequences or few microbatches, here with 4 slices: much less memory and bubble",
    ZB_AUTO: "uneven stages, passes of unequal length, or any other memory limit",
}


def at_equal_passes() -> str:
    """Bubble, memory and messages of every schedule, computed, and when to take it."""
    rows = []
    for name, timeline in _timelines().items():
        if name not in _WHEN:
            continue  # docs/slices.md compares the schedules of slices
        peak = max(timeline.peak_activation)
        rows.append(
            (
                code(name),
                f"{timeline.bubble_rate('span'):.1%} / {timeline.bubble_rate('makespan'):.1%}",
                f"{peak / _RANKS:.2f}",
                str(_messages(timeline)),
                _WHEN[name],
            )
        )
    rows.append((code(ZB_AUTO), "searched", "the limit", f"{2 * (_RANKS - 1)} or {4 * (_RANKS - 1)}", _WHEN[ZB_AUTO]))
    words = (
        f"Computed for {_RANKS} ranks, {_MICROBATCHES} microbatches, F = B = W and free transfers. "
        "Bubble: idle share with post-validation (span) / with a synchronous optimizer (makespan); it shrinks with "
        "more microbatches. Memory: peak activations over those of 1F1B. Messages: sends between ranks per "
        "microbatch. V: two stages per rank, the second half of the model in reverse order of ranks."
    )
    return f"{words}\n\n{table(('schedule', 'bubble', 'memory', 'messages', 'take it for'), rows)}"


def in_short() -> str:
    """The schedules to begin with: bubble and memory, computed, and when to take each."""
    timelines = _timelines()
    rows = [
        (
            code(name),
            f"{timelines[name].bubble_rate('makespan'):.0%}",
            f"{max(timelines[name].peak_activation) / _RANKS:.2f}",
            _WHEN[name],
        )
        for name in _FIRST
    ]
    rows.append((code(ZB_AUTO), "searched", "the limit", _WHEN[ZB_AUTO]))
    words = (
        f"Computed for {_RANKS} ranks and {_MICROBATCHES} microbatches; memory is that of activations, over 1F1B's, "
        f"which idles {timelines['1f1b'].bubble_rate('makespan'):.0%}."
    )
    return f"{table(('schedule', 'bubble', 'memory', 'take it for'), rows)}\n\n{words}"


def formulas() -> str:
    """What every schedule's recipe states."""
    stages = {"linear": "1", "vee": "2, in a V", "interleaved": "v, in a loop"}
    rows = [
        (code(known.name), stages[known.shape], code(known.bubble), code(known.memory), known.summary)
        for known in SCHEDULES.values()
    ]
    return table(("schedule", "stages per rank", "bubble", "peak activations", "in one line"), rows)


def at_published_times() -> str:
    """Bubble rates at the pass times that the paper's authors measured."""
    lines = (line for line in _PROFILES.read_text().splitlines() if not line.startswith("#"))
    profile = next(row for row in csv.DictReader(lines) if (row["model"], row["p"], row["m"]) == _PUBLISHED)
    ranks, microbatches = int(profile["p"]), int(profile["m"])
    times = [float(profile[f"t_{name}_ms"]) for name in ("f", "b", "w", "comm")]
    rows = []
    for name, recipe in SCHEDULES.items():
        if recipe.sliced:
            continue  # the paper's profiles do not say how much of a pass is attention
        schedule = build(name, num_ranks=ranks, num_microbatches=microbatches)
        timeline = simulate(schedule, *_uniform(schedule.placement, times))
        rates = [f"{timeline.bubble_rate(metric):.1%}" for metric in ("span", "makespan")]
        rows.append((code(name), *rates, f"{max(timeline.peak_activation) / ranks:.2f}"))
    words = (
        f"A GPT of {profile['model']} parameters on A100s, {ranks} ranks, {microbatches} microbatches: F {times[0]:g}, "
        f"B {times[1]:g}, W {times[2]:g}, transfer {times[3]:g} ms "
        "([Zero Bubble Pipeline Parallelism](https://arxiv.org/abs/2401.10241), Table 9). Every schedule as published."
    )
    head = ("schedule", "bubble (span)", "bubble (makespan)", "memory / 1F1B's")
    return f"{words}\n\n{table(head, rows)}"


def picture() -> str:
    """The same work under three schedules, as SVG: 4 ranks, 8 microbatches, passes of 10 ms."""
    timelines = []
    for name in _DRAWN:
        schedule = build(name, num_ranks=4, num_microbatches=8)
        timelines.append(simulate(schedule, *_uniform(schedule.placement, [10.0, 10.0, 10.0, 0.0])))
    return render_svg(*timelines)


def _timelines() -> dict[str, Timeline]:
    """Every named schedule at equal passes."""
    schedules = {name: build(name, num_ranks=_RANKS, num_microbatches=_MICROBATCHES) for name in SCHEDULES}
    times = [1.0, 1.0, 1.0, 0.0]
    return {name: simulate(schedule, *_uniform(schedule.placement, times)) for name, schedule in schedules.items()}


def _uniform(placement: Placement, times: list[float]) -> tuple[PassCosts, PassMemory]:
    return PassCosts.uniform(placement, *times), PassMemory.uniform(placement)


def _messages(timeline: Timeline) -> int:
    """Activations and gradients that a microbatch sends from rank to rank."""
    ranks = timeline.schedule.placement.stage_to_rank
    return 2 * sum(ranks[stage] != ranks[stage + 1] for stage in range(len(ranks) - 1))


PICTURES = {"schedules.svg": picture}
PARTS = {
    "schedules": at_equal_passes,
    "schedules-short": in_short,
    "schedule-formulas": formulas,
    "schedules-published": at_published_times,
}
