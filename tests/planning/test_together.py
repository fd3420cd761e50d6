"""Answers in which several features meet: one plan, simulated with all that it has."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.zero_bubble import PassCosts, PassMemory, Placement
from megatron.zero_bubble.core.analysis.score import within
from megatron.zero_bubble.core.costs.experts import NO_EXPERTS, ExpertParts
from megatron.zero_bubble.core.costs.layers import LayerCosts, LayerFigures
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir.vocabulary import Divided, algorithm_of
from megatron.zero_bubble.core.plan import Additions, plan_of
from megatron.zero_bubble.core.plan.timelines import timeline_of
from megatron.zero_bubble.planning.answer import Answer, answer
from megatron.zero_bubble.planning.division import Division
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig
from megatron.zero_bubble.planning.layout_plan import EVEN, LayoutPlan
from megatron.zero_bubble.planning.offload import OffloadPlan
from megatron.zero_bubble.planning.plan_file import written
from megatron.zero_bubble.planning.plans import peak_memory
from megatron.zero_bubble.planning.question import Offloading, Question
from megatron.zero_bubble.planning.setup import BY_COST, Named, Offload, Searched, Setup, Shards
from megatron.zero_bubble.planning.shards import Replicas, ShardPlan
from tests.helpers.equal_weights import EqualStages

P, M, MICROBATCH = 4, 16, 1000.0
UNITS, SEARCHED = Named("zero-pp"), Searched()


def figures(parameters: float = 100.0) -> Figures:
    def on(placement: Placement) -> tuple[PassCosts, PassMemory]:
        stages, share = placement.num_stages, P / placement.num_stages
        times = {
            name: (ms * share,) * stages for name, ms in (("host_ms", 8.0), ("gather_ms", 2.0), ("reduce_ms", 2.0))
        }
        costs = PassCosts.uniform(placement, 10.0, 10.0, 10.0)
        return replace(costs, **times), PassMemory.uniform(placement, MICROBATCH, 0.3 * MICROBATCH)  # type: ignore[arg-type]

    return Figures(P, M, on, weights=EqualStages(lambda placement: parameters * P / placement.num_stages))


def asked(order: Named | Searched, limit: float, moves: bool) -> Answer:
    limits = (limit, 2 * limit) if order == SEARCHED else (None, limit, 2 * limit)  # a search has a limit
    setup = Setup(order, offload=Offload("auto") if moves else None, shards=Shards())
    replicas = Replicas(8, None, 2, limit, limit)
    return answer(Question(figures(), setup, limit, Offloading(limits, limit) if moves else None, replicas))


@pytest.mark.parametrize("order", [UNITS, SEARCHED], ids=["zero-pp", "zb-auto"])
def test_offloading_makes_units_shorter_within_a_limit_that_includes_weights(order: Named | Searched) -> None:
    limit = 5.0 * MICROBATCH
    kept, moved = (asked(order, limit, moves) for moves in (False, True))
    units, copies = moved.part(ShardPlan), moved.part(OffloadPlan)
    assert kept.part(ShardPlan) is not None and units is not None and copies is not None
    assert within(max(units.peaks), limit), "shards, what is whole at a time, and activations"
    assert moved.timeline.makespan_ms <= kept.timeline.makespan_ms
    if order == UNITS:
        assert copies.moves
        assert moved.timeline.makespan_ms < 0.95 * kept.timeline.makespan_ms


def test_the_timeline_and_all_figures_are_those_of_one_plan() -> None:
    made = asked(UNITS, 5.0 * MICROBATCH, moves=True)
    units, copies = made.part(ShardPlan), made.part(OffloadPlan)
    assert units is not None and copies is not None
    again = timeline_of(made.schedule, *made.costs.on(made.schedule.placement), made.added)
    assert again == made.timeline == copies.timeline == units.timeline
    assert copies.device_peak == units.activations
    assert {str(span.op)[:1] for row in made.timeline.lanes for span in row}, (
        "copies, gathers and reductions have lanes"
    )


def test_a_search_for_units_takes_several_stages_per_rank() -> None:
    limit = 8.0 * MICROBATCH
    made = asked(SEARCHED, limit, moves=False)
    units = made.part(ShardPlan)
    assert made.schedule.num_stages > P and units is not None
    assert within(max(units.peaks), limit)
    assert made.timeline.makespan_ms <= asked(UNITS, limit, moves=False).timeline.makespan_ms
    with pytest.raises(UserError, match="sharded units need 2 or more stages per rank"):
        asked(Searched("linear"), limit, moves=False)


def test_a_plan_file_runs_the_plan_that_was_simulated(tmp_path: Path) -> None:
    made = asked(UNITS, 5.0 * MICROBATCH, moves=True)
    file = tmp_path / "plan.json"
    file.write_text(written(made))
    config = ZeroBubbleConfig(schedule_file=str(file))
    source = config.sources()(P)
    select = config.selection(source)
    assert select is not None and made.added.moves and config.setup.shards
    added = Additions(moves=tuple(select(made.schedule)), sharding=config.sharding(P))
    assert added == made.added
    assert plan_of(source.make(M), added).digest == plan_of(made.schedule, made.added).digest


LAYERS = (LayerFigures(1.0, 1.1, 0.9, 4.0, 2.0, gather_ms=0.4, reduce_ms=0.4),) * 6 + (
    LayerFigures(2.4, 2.6, 2.0, 6.0, 3.0, gather_ms=0.8, reduce_ms=0.8),
) * 18
ALL_TO_ALLS = (NO_EXPERTS,) * 6 + (ExpertParts(1, 0, 0.4, 0.7, 0.4, 0.4, 0.7, 0.4, 0, 0.6, 0),) * 18


def of_layers(experts: bool = False) -> Figures:
    """Six short layers before eighteen long ones, whose even split is far from even work."""

    def unused(_: Placement) -> tuple[PassCosts, PassMemory]:
        raise AssertionError("costs of even stages come from the layers")

    ends = LayerFigures(0.2, 0.0, 0.2), LayerFigures(2.0, 2.5, 2.0, 3.0, 1.0)
    layers = LayerCosts(LAYERS, *ends, comm_ms=0.1, experts=ALL_TO_ALLS if experts else ())
    return Figures(4, 8, unused, memory_given=True, layers=layers, division=Division(24)).evenly()


def with_layout(name: str, more: str, by_cost: bool) -> Answer:
    costs = of_layers(more == "pairs")
    limit = costs.limit("2.5p" if more in ("1", "2") else "1.5p")
    setup = Setup(
        Searched("auto") if name == "zb-auto" else Named(name),
        vocabulary=Divided(1 if more == "1" else 2) if more in ("1", "2") else None,
        shards=Shards() if more == "shards" else None,
        layout=BY_COST if by_cost else None,
        pairs=more == "pairs",
    )
    replicas = Replicas(2, None, None, math.inf, limit) if more == "shards" else None
    return answer(Question(costs, setup, limit, replicas=replicas, effort=0.1))


@pytest.mark.usefixtures("short_searches")
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("zb-h1", "1"),
        ("zb-v", "2"),
        ("zb-auto", "2"),
        ("zero-pp", "shards"),
        ("zb-auto", "shards"),
        ("dualpipe-v", "pairs"),
        ("zb-v", "pairs"),
    ],
)
def test_layouts_are_chosen_by_the_timeline_of_their_plan(name: str, more: str) -> None:
    """With the passes of the vocabulary, the collectives of units, or the all-to-alls of experts."""
    evenly, made = (with_layout(name, more, by_cost) for by_cost in (False, True))
    on, laid_out = made.schedule.placement, made.part(LayoutPlan)
    assert laid_out is not None and sum(laid_out.best.layout) == 24
    assert made.timeline.makespan_ms < 0.99 * evenly.timeline.makespan_ms
    assert laid_out.best.ms == made.timeline.makespan_ms and laid_out.gains()[EVEN] > 0.01
    limit = made.question.limit
    assert within(peak_memory(evenly.timeline, evenly.costs), limit) and within(
        peak_memory(made.timeline, made.costs), limit
    )
    assert timeline_of(made.schedule, *made.costs.on(on), made.added) == made.timeline
    assert made.costs.on(on)[0].forward_ms == made.costs.laid_out(on, laid_out.best.layout).on(on)[0].forward_ms
    assert (algorithm_of(made.schedule) is not None) is (more in ("1", "2"))
    assert (made.part(ShardPlan) is not None) is (more == "shards")
    assert made.schedule.overlaps is (more == "pairs")
