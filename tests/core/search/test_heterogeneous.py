"""Unequal stages and links: planning with the true costs beats every plan made for uniform costs."""

from __future__ import annotations

from itertools import product
from statistics import mean

import pytest

from megatron.zero_bubble import PassCosts, PassMemory, Placement, Schedule, build, simulate
from megatron.zero_bubble.core.search import zb_auto
from tests.helpers.rows import some

P, M = 8, 24


def true_costs(profile: tuple[float, float, float, float]) -> PassCosts:
    """Return costs per half rank: first and last stage (embedding, loss) cost 40 % more, one link ten times more."""
    f, b, w, comm = profile
    scale = [1.4, *[1.0] * (P - 2), 1.4]
    links = {(3, 4): 10 * comm, (4, 3): 10 * comm}
    whole = PassCosts(*(tuple(ms * s for s in scale) for ms in (f, b, w)), comm, links)
    return whole.fit(Placement.vee(P))


def averaged(costs: PassCosts) -> PassCosts:
    """Replace the costs of each kind of pass by their mean."""
    figures = (costs.forward_ms, costs.backward_ms, costs.wgrad_ms)
    return PassCosts(*((mean(row),) * costs.num_stages for row in figures), costs.comm_ms)


FIRST, SECOND = (18.5, 18.1, 9.3, 0.6), (29.7, 29.4, 19.9, 0.53)
CASES = product((FIRST, SECOND), (P / 2 + 1, P, 2 * P), ("span", "makespan"))


@pytest.mark.parametrize(
    ("profile", "limit", "objective"), some(CASES, (FIRST, P / 2 + 1, "span"), (SECOND, P, "makespan"))
)
def test_plan_for_true_costs_beats_uniform_plans(
    profile: tuple[float, float, float, float], limit: float, objective: str
) -> None:
    costs, memory = true_costs(profile), PassMemory.uniform(Placement.vee(P))

    def cost(schedule: Schedule) -> float:
        """Cost with the true costs; infinite beyond the limit."""
        fitted = costs.fit(schedule.placement), memory.fit(schedule.placement)
        timeline = simulate(schedule, *fitted)
        kept = max(timeline.peak_activation)
        return getattr(timeline, f"{objective}_ms") if kept <= limit + 1e-9 else float("inf")

    uniform = [
        *(
            zb_auto(averaged(costs), memory, P, M, limit, placement=placement, objective=objective)
            for placement in ("linear", "vee")
        ),
        *(build(name, num_ranks=P, num_microbatches=M) for name in ("1f1b", "zb-h1", "zb-h2")),
    ]
    assert cost(zb_auto(costs, memory, P, M, limit, objective=objective)) < min(map(cost, uniform))
