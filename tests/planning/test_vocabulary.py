"""Plans with vocabulary parallelism."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from megatron.zero_bubble import PassMemory, Placement, Schedule, build, simulate
from megatron.zero_bubble.core.analysis.score import Goal
from megatron.zero_bubble.core.analysis.timeline import Metric, Timeline
from megatron.zero_bubble.core.analysis.validate import validate
from megatron.zero_bubble.core.costs.vocabulary import VocabularyCosts
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.costs import read_costs_file
from megatron.zero_bubble.core.formats.plan import PlanFile
from megatron.zero_bubble.core.ir.vocabulary import Algorithm, Divided, algorithm_of
from megatron.zero_bubble.core.plan.timelines import timeline_of
from megatron.zero_bubble.core.search.vocabulary import best_with_vocabulary
from megatron.zero_bubble.planning.answer import Answer, answer
from megatron.zero_bubble.planning.figures import Figures, measured
from megatron.zero_bubble.planning.plans import peak_memory
from megatron.zero_bubble.planning.question import Question
from megatron.zero_bubble.planning.setup import Given, Searched, Setup, Synchronous, Validated
from megatron.zero_bubble.planning.vocabulary import (
    Variant,
    divided_by,
    inserted,
    variants,
)
from tests.helpers.rows import some

ROOT = Path(__file__).parents[2] / "configs" / "published" / "vocabulary_a100"


def figures_of(name: str, num_microbatches: int = 24) -> Figures:
    return measured(read_costs_file(ROOT / f"{name}.json"), 8, num_microbatches)


def test_costs_with_s_and_t_are_only_for_divided_vocabularies() -> None:
    costs = figures_of("vocabulary_2_64k")
    assert [variant.algorithm for variant in variants(costs, divided_by(costs, None))] == [1, 2]
    assert [variant.algorithm for variant in variants(costs, Divided(2))] == [2]
    with pytest.raises(UserError, match="do not suit a job that does not divide them; leave out --vocabulary off"):
        divided_by(costs, "off")
    with pytest.raises(UserError, match="--recompute-logits changes only estimated times"):
        divided_by(costs, "2", Divided("auto", recompute_logits=True))


def test_costs_per_layer_are_for_all() -> None:
    costs = figures_of("stock_64k")
    assert [variant.algorithm for variant in variants(costs, divided_by(costs, None))] == [None]
    assert [variant.algorithm for variant in variants(costs, Divided("auto"))] == [None, 1, 2]
    (divided,) = variants(costs, Divided(2))
    on = Placement.linear(8)
    (before, _), (after, memory) = costs.on(on), divided.costs.on(on)
    assert after.forward_ms[-1] < before.forward_ms[-1] and len({*after.forward_ms}) == 1
    assert after.vocabulary is not None and memory == PassMemory.uniform(on)
    assert divided.costs.limit("1p") == costs.limit("1p") == 8.0


def test_costs_of_whole_ranks_are_not_enough() -> None:
    with pytest.raises(UserError, match="needs the times of its passes; got costs without them; give --output-ms"):
        variants(figures_of("moved_layers_64k"), Divided(2))
    times = VocabularyCosts.uniform(8, 1.0, 1.0)
    (variant,) = variants(figures_of("moved_layers_64k").giving(vocabulary=times), Divided(2))
    assert variant.costs.on(Placement.vee(8))[0].vocabulary == times


def test_the_shortest_variant_within_the_limit_is_chosen() -> None:
    """Undivided, 256k tokens take longest, but need the least memory; algorithm 1 needs the most."""
    costs = figures_of("stock_256k")
    choices = variants(costs, Divided("auto"))
    peaks = {variant.algorithm: peak_memory(_inserted(_zb_h1(), variant, "span"), variant.costs) for variant in choices}
    assert peaks == {None: 8.0, 1: 10.0, 2: 9.0}
    for limit, chosen in ((7.0, None), (8.0, None), (9.0, 2)):
        best = _best(costs, limit, _zb_h1())
        assert algorithm_of(best.timeline.schedule) == chosen
    assert algorithm_of(_best(costs, None, _zb_h1()).timeline.schedule) is not None


@pytest.mark.parametrize(("name", "algorithm"), some(product(["stock_32k", "stock_256k"], [1, 2]), ("stock_256k", 2)))
def test_zb_auto_is_never_longer_than_1f1b_at_its_memory(algorithm: Algorithm, name: str) -> None:
    (variant,) = variants(figures_of(name), Divided(algorithm))
    plain = build("1f1b", num_ranks=8, num_microbatches=24)
    on = variant.costs.on(plain.placement)
    known = simulate(best_with_vocabulary(plain, *on, algorithm, Goal("span")), *on)
    limit = peak_memory(known, variant.costs)
    best = answer(
        Question(variant.costs, Setup(Searched("linear"), vocabulary=Divided(algorithm), step=Validated()), limit)
    )
    validate(best.timeline.schedule)
    assert best.timeline.span_ms < 0.97 * known.span_ms
    assert peak_memory(best.timeline, variant.costs) <= limit * (1 + 1e-9)


ROWS = sorted(path.stem for path in ROOT.iterdir() if not path.stem.startswith("moved"))


@pytest.mark.parametrize(
    ("name", "num_microbatches", "objective"),
    some(product(ROWS, (3, 24, 128), ("span", "makespan")), ("vocabulary_2_256k", 3, "span")),
)
def test_zb_auto_is_never_longer_than_algorithm_2_on_1f1b_for_any_published_row(
    name: str, num_microbatches: int, objective: Metric
) -> None:
    """Whichever algorithm is chosen at that memory, on either placement; 128 is the number of the measured jobs."""
    costs = figures_of(name, num_microbatches)
    choices = variants(costs, Divided("auto"))
    (second,) = (variant for variant in choices if variant.algorithm == 2)
    plain = build("1f1b", num_ranks=8, num_microbatches=num_microbatches)
    known = _inserted(plain, second, objective)
    limit = peak_memory(known, second.costs)
    step = Validated() if objective == "span" else Synchronous()
    best = answer(Question(costs, Setup(Searched(), vocabulary=Divided("auto"), step=step), limit))
    assert peak_memory(best.timeline, best.costs) <= limit * (1 + 1e-9)
    assert _ms(best.timeline, objective) <= _ms(known, objective) * (1 + 1e-9)


def _ms(timeline: Timeline, objective: Metric) -> float:
    return timeline.makespan_ms if objective == "makespan" else timeline.span_ms


def test_a_schedule_with_passes_of_the_vocabulary_stays() -> None:
    (variant,) = variants(figures_of("vocabulary_2_64k"), Divided(2))
    made = inserted(_zb_h1(), variant, Goal("span"))
    assert inserted(made, variant, Goal("span")) is made
    assert inserted(_zb_h1(), Variant(None, variant.costs), Goal("span")) == _zb_h1()


def _best(costs: Figures, limit: float | None, schedule: Schedule) -> Answer:
    order = Given(schedule.name, PlanFile(schedule))
    return answer(Question(costs, Setup(order, vocabulary=Divided("auto"), step=Validated()), limit))


def _inserted(schedule: Schedule, variant: Variant, objective: Metric) -> Timeline:
    made = inserted(schedule, variant, Goal(objective))
    return timeline_of(made, *variant.costs.on(made.placement))


def _zb_h1() -> Schedule:
    return build("zb-h1", num_ranks=8, num_microbatches=24)
