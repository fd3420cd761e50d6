"""Stages that repeat CUDA graphs by slot give the same bits as without; a stand-in takes the place of the GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from megatron.zero_bubble.core.plan import num_slots, plan_of, slots
from megatron.zero_bubble.core.schedules import build
from tests.helpers.graphs import StandInPool
from tests.helpers.megatron_lm import Checkout, checkouts
from tests.helpers.ranks import RankPool
from tests.helpers.rows import some
from tests.helpers.stage_graphs import KIND, WARM, Row, train
from tests.loops.checkouts import check_on

OVERLAPS = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
ROWS = {
    **{
        f"{schedule} {'fused' if fused else 'exact'}": Row(schedule, fused=fused)
        for schedule in ("1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "zb-interleaved")
        for fused in (False, True)
    },
    "zb-v on four ranks": Row("zb-v", 4, (8, 8)),
    "zb-h2 on four ranks": Row("zb-h2", 4, (8, 8), True),
    "recomputed": Row("zb-h1", options=SELECTIVE),
    "replicas": Row("zb-v", replicas=2, parallel=OVERLAPS),
    "replicas fused": Row("zb-h1", replicas=2, parallel=OVERLAPS, fused=True),
    "replicas unsplit": Row("1f1b", replicas=2, parallel=OVERLAPS),
    "validated": Row("zb-h2", counts=(4,) * 10, spikes=(5, 6)),
    "validated fused": Row("zb-h1", counts=(4,) * 10, spikes=(5, 6), fused=True),
    "evaluated": Row("zb-v", evaluates=True, fused=True),
    "followed": Row("zb-h1", counts=(4,) * 5, follows=(3, "zb-h2")),
}
SMALL = [
    name for name in ROWS if name.endswith((" exact", " fused")) and name.split()[0] not in ("replicas", "validated")
]
DEFAULT = ("recomputed", "1f1b exact", "zb-h1 fused", "zb-v exact", "v-half fused", "zb-interleaved exact", "replicas")
DEFAULT += ("replicas fused", "validated", "evaluated", "followed")


@pytest.mark.parametrize("name", some(ROWS, *DEFAULT))
def test_same_bits(ranks: RankPool, name: str) -> None:
    row = ROWS[name]
    eager, graphed = (ranks.run(row.ranks * row.replicas, train, row, graphs) for graphs in (False, True))
    assert [read for read, _ in graphed] == [read for read, _ in eager]
    assert not any(any(numbers) for _, numbers in eager), "these run without graphs"
    assert [sum(numbers) for _, numbers in graphed] == number_of_slots(row)
    if row.spikes is not None:
        assert dict(graphed[0][0][0][-1])["repeated"] >= 1


def number_of_slots(row: Row) -> list[int]:
    """What every rank needs for all microbatches of a row."""
    names = {row.schedule, row.schedule if row.follows is None else row.follows[1]}
    built = (build(name, num_ranks=row.ranks, num_microbatches=count) for name in names for count in row.counts[WARM:])
    plans = [plan_of(schedule) for schedule in built]
    of_ranks = [max(num_slots(slots(plan, rank)) for plan in plans) for rank in range(row.ranks)]
    return [number for number in of_ranks for _ in range(row.replicas)]


@pytest.mark.full
@pytest.mark.parametrize("checkout", checkouts(), ids=str)
def test_same_bits_on_other_versions(checkout: Checkout, tmp_path: Path) -> None:
    check_on(checkout, {"graphs": (KIND, {"schedule": "zb-v"})}, tmp_path)


class OnePool(StandInPool):
    """One pool for all graphs."""

    made: ClassVar[list[StandInPool]] = []

    def __new__(cls, generators: Any) -> Any:
        cls.made.extend([] if cls.made else [StandInPool(generators)])
        return cls.made[0]


def one_slot_less(patch: Any) -> None:
    from megatron.zero_bubble.integration.adapter import prepared

    def fewer(plan: Any, rank: int, of: Callable[..., Any] = prepared.slots) -> Any:
        return {stage: [slot % max(*own, 1) for slot in own] for stage, own in of(plan, rank).items()}

    patch.setattr(prepared, "slots", fewer)


@pytest.mark.parametrize("name", some(SMALL, "zb-h1 fused", "zb-v exact"))
def test_slots_in_one_pool_are_wrong(ranks: RankPool, name: str) -> None:
    row = ROWS[name]
    assert "nan" in str(ranks.run(row.ranks * row.replicas, train, row, True, OnePool))


@pytest.mark.parametrize("name", some(SMALL, "zb-h1 fused", "zb-v exact"))
def test_one_slot_too_few_is_wrong(ranks: RankPool, name: str) -> None:
    row = ROWS[name]
    count = row.ranks * row.replicas
    right, fewer = (ranks.run(count, train, row, True, StandInPool, edit) for edit in (_nothing, one_slot_less))
    assert fewer != right


def _nothing(_: Any) -> None:
    pass


def said(rank: int) -> dict[str, str]:
    """The refusals of models that graphs would not repeat faithfully."""
    import torch

    from megatron.zero_bubble.core.errors import UserError
    from megatron.zero_bubble.integration.adapter.graphed_block import Arguments
    from tests.helpers import stage_graphs

    def with_a_hook(row: Row, model: Any, *more: Any) -> Any:
        model[0].module.decoder.layers[0].register_forward_hook(lambda *_: None)
        return run(row, model, *more)

    def with_a_parameter_hook(row: Row, model: Any, *more: Any) -> Any:
        next(model[0].module.decoder.parameters()).register_hook(lambda grad: grad)
        return run(row, model, *more)

    found, run = {}, stage_graphs.steps
    for name, steps in {"module": with_a_hook, "parameter": with_a_parameter_hook}.items():
        with pytest.raises(UserError) as caught:
            train(rank, Row("zb-h1"), True, edit=lambda patch, own=steps: patch.setattr(stage_graphs, "steps", own))
        found[name] = str(caught.value)
    calls, passes = [], stage_graphs.passes

    def with_a_late_hook(model: Any, *more: Any, **options: Any) -> Any:
        calls.append(model)
        if len(calls) == 3:  # graphs were recorded in the second iteration
            model[0].module.decoder.layers[0].register_forward_hook(lambda *_: None)
        return passes(model, *more, **options)

    with pytest.raises(UserError) as caught:
        train(rank, Row("zb-h1"), True, edit=lambda patch: patch.setattr(stage_graphs, "passes", with_a_late_hook))
    found["late"] = str(caught.value)
    one, other = (Arguments((torch.zeros(size), "causal"), {}) for size in (2, 3))
    with pytest.raises(UserError) as caught:
        one.copy(other)
    found["shape"] = str(caught.value)
    with pytest.raises(UserError) as caught:
        Arguments((torch.zeros(1, requires_grad=True),), {})
    found["gradient"] = str(caught.value)
    return found


def test_refusals(ranks: RankPool) -> None:
    first, _ = ranks.run(2, said)
    assert "hooks" in first["module"] and "TransformerLayer" in first["module"]
    assert first["late"] == first["module"]
    assert "a parameter of shape" in first["parameter"]
    assert "torch.float32 (3,), 'causal'" in first["shape"]
    assert "detach it" in first["gradient"]
