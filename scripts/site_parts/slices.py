"""Tables and the picture of schedules of sequence slices, computed by the planning library."""

from __future__ import annotations

from megatron.zero_bubble.core.analysis.score import Goal
from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.costs.cuts import balanced
from megatron.zero_bubble.core.ir import Placement, Slices
from megatron.zero_bubble.core.render.svg import render_svg
from megatron.zero_bubble.core.schedules import build
from megatron.zero_bubble.planning.cuts import search
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.setup import Cuts
from megatron.zero_bubble.planning.source import ZB_AUTO
from site_parts.markdown import code, table

_SIZE = {"num_ranks": 8, "num_microbatches": 8}
_NUMBERS = (1, 2, 4, 8, 16)
_SHARES = (0.0, 0.1, 0.3, 0.5, 0.8)
_SPLIT, _FUSED = "seq-zb-h1", "seq-1f1b"


def by_number() -> str:
    """Bubble and memory against the number of slices."""
    rows = []
    for number in _NUMBERS:
        fused, split = (_timeline(name, Slices.even(number)) for name in (_FUSED, _SPLIT))
        peak = max(split.peak_activation)
        cells = [f"{t.bubble_rate('makespan'):.1%}" for t in (fused, split)]
        cells.append(f"{_searched(Slices.even(number), peak + 1 / 8).bubble_rate('makespan'):.1%}")
        rows.append((str(number), *cells, f"{peak / _SIZE['num_ranks']:.2f}"))
    words = (
        f"{_SIZE['num_ranks']} ranks, {_SIZE['num_microbatches']} microbatches, F = B = W, free transfers and no "
        "attention. The bubble is that of the makespan; memory is the peak over that of 1F1B. The search on a V gets "
        "an eighth of a microbatch more than that."
    )
    return f"{words}\n\n{table(('slices', code(_FUSED), code(_SPLIT), code(ZB_AUTO) + ' on a V', 'memory'), rows)}"


def by_cuts() -> str:
    """Bubbles of even and balanced cuts, by the share of attention."""
    rows = []
    for share in _SHARES:
        cells = [f"{share:.0%}"]
        for number in (4, 8):
            costs = _costs(Placement.linear(_SIZE["num_ranks"]), share)
            cuts = Slices.even(number), balanced(costs, number)
            cells += [f"{_timeline(_SPLIT, slices, share).bubble_rate('makespan'):.1%}" for slices in cuts]
            cells.append(f"{max(cuts[1].shares) * number:.2f}")
        rows.append(tuple(cells))
    head = ["attention"]
    for number in (4, 8):
        head += [f"{number} even", f"{number} balanced", "longest / even"]
    words = (
        f"{code(_SPLIT)}, {_SIZE['num_ranks']} ranks, {_SIZE['num_microbatches']} microbatches. *Attention* is its "
        "share of F; it takes twice as long in B and nothing in W, and everything else takes equally long in F, B and "
        "W. *longest / even*: tokens of the longest balanced slice over those of an even one."
    )
    return f"{words}\n\n{table(tuple(head), rows)}"


def picture() -> str:
    """ZB-H1 with whole sequences, with four even slices, and with four balanced slices, as SVG."""
    placement = Placement.linear(4)
    costs = _costs(placement, 0.5, 10.0)
    size = {"num_ranks": 4, "num_microbatches": 4}
    whole = build("zb-h1", **size)
    cuts = Slices.even(4), balanced(costs, 4)
    sliced = [build(_SPLIT, **size, num_slices=slices) for slices in cuts]
    memory = PassMemory.uniform(placement)
    timelines = (simulate(schedule, costs, memory) for schedule in (whole, *sliced))
    return render_svg(*timelines, titles=("whole sequences", "even slices", "balanced slices"))


def _timeline(name: str, slices: Slices, attention: float = 0.0) -> Timeline:
    schedule = build(name, **_SIZE, num_slices=slices)
    return simulate(schedule, _costs(schedule.placement, attention), PassMemory.uniform(schedule.placement))


def _searched(slices: Slices, limit: float) -> Timeline:
    """What ``zb-auto`` finds on a V within ``limit`` microbatches."""
    on = Placement.vee(_SIZE["num_ranks"])
    costs = _costs(on, 0.0)
    memory = PassMemory.uniform(on)

    def given(_: Placement) -> tuple[PassCosts, PassMemory]:
        return costs, memory

    figures = Figures(_SIZE["num_ranks"], _SIZE["num_microbatches"], given)
    return simulate(search(figures, "vee", Goal(limit=limit), Cuts(among=(slices,))), costs, memory)


def _costs(placement: Placement, attention: float, ms: float = 1.0) -> PassCosts:
    return PassCosts.uniform(placement, ms, ms * (1 + attention), ms * (1 - attention), attention=attention)


PICTURES = {"slices.svg": picture}
PARTS = {"slices": by_number, "slice-cuts": by_cuts}
