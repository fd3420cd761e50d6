"""Stages that repeat CUDA graphs by slot give the same bits as without; a stand-in takes the place of the GPU."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.plan import slots
from megatron.zero_bubble.core.plan.plan_of import plan_without_messages
from megatron.zero_bubble.core.schedules import build
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig
from megatron.zero_bubble.planning.source import ScheduleSource
from tests.helpers.graphs import StandInPool
from tests.helpers.megatron_lm import Checkout, checkouts
from tests.helpers.ranks import RankPool
from tests.helpers.rows import some
from tests.helpers.stage_graphs import KIND, WARM, Row, train
from tests.loops.checkouts import check_on

OVERLAPS = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
PREDICTIONS = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.5}
SCHEDULES = ("1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "zb-interleaved")
ROWS = {
    **{
        f"{schedule} {'fused' if fused else 'exact'}": Row(schedule, fused=fused)
        for schedule in SCHEDULES
        for fused in (False, True)
    },
    "zb-v on four ranks": Row("zb-v", 4, (8, 8)),
    "zb-h2 on four ranks": Row("zb-h2", 4, (8, 8), True),
    "recomputed": Row("zb-h1", options=SELECTIVE),
    "predictions": Row("1f1b", options=PREDICTIONS),
    "split predictions": Row("zb-h1", options=PREDICTIONS),
    "dropout": Row("zb-h1", options=DROPOUT, fused=True),
    "dropout on a V": Row("zb-v", options=DROPOUT),
    "tensor parallel": Row("zb-h1", tensor=2),
    "sequence parallel": Row("zb-h2", 2, (4, 5), True, {"sequence_parallel": True, **DROPOUT}, tensor=2),
    "vocabulary": Row("zb-h1", vocabulary=2),
    "vocabulary on a V": Row("zb-v", vocabulary=1, fused=True),
    "replicas": Row("v-half", replicas=2, parallel=OVERLAPS),
    "replicas fused": Row("zb-interleaved", replicas=2, parallel=OVERLAPS, fused=True),
    "replicas unsplit": Row("1f1b", replicas=2, parallel=OVERLAPS),
    "replicas with all optimizer states": Row("zb-h1", replicas=2, parallel={"overlap_grad_reduce": True}),
    "validated": Row("zb-h2", counts=(4,) * 7, spikes=(3, 4)),
    "validated fused": Row("zb-h1", counts=(4,) * 10, spikes=(5, 6), fused=True),
    "evaluated": Row("zb-v", evaluates=True),
    "followed": Row("zb-h1", counts=(4,) * 5, follows=(3, "zb-h2")),
}
SMALL = [f"{schedule} {mode}" for schedule in SCHEDULES for mode in ("exact", "fused")]
DEFAULT = ("recomputed", "predictions", "dropout", "sequence parallel", "vocabulary on a V", "replicas")
DEFAULT += ("zb-interleaved fused", "validated", "evaluated", "followed", "v-half fused", "zb-interleaved exact")


def test_all_schedules_run_by_default() -> None:
    ran = {(ROWS[name].schedule, ROWS[name].fused) for name in DEFAULT}
    assert ran >= {(schedule, fused) for schedule in SCHEDULES[1:] for fused in (False, True)}


@pytest.mark.parametrize("name", some(ROWS, *DEFAULT))
def test_same_bits(ranks: RankPool, name: str) -> None:
    row = ROWS[name]
    eager, graphed = (ranks.run(row.num_ranks, train, row, graphs) for graphs in (False, True))
    assert [read for read, _ in graphed] == [read for read, _ in eager]
    assert not any(any(numbers) for _, numbers in eager), "these run without graphs"
    assert [sum(numbers) for _, numbers in graphed] == number_of_slots(row)
    if row.spikes is not None:
        assert dict(graphed[0][0][0][-1])["repeated"] >= 1


def number_of_slots(row: Row) -> list[int]:
    """What every rank needs for all microbatches of a row."""
    needed: Counter[tuple[int, int]] = Counter()  # by rank and stage
    first, last = (0, row.schedule) if row.follows is None else row.follows
    setup = ZeroBubbleConfig(last, vocabulary=row.vocabulary).setup
    for count in row.counts[max(WARM, first) :]:
        plan = plan_without_messages(ScheduleSource.of(setup, row.ranks).make(count))
        for rank in range(row.ranks):
            needed |= Counter({(rank, stage): max(own) + 1 for stage, own in slots(plan, rank).items()})
    of_ranks = [sum(number for (own, _), number in needed.items() if own == rank) for rank in range(row.ranks)]
    return [number for number in of_ranks for _ in range(row.num_ranks // row.ranks)]


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
    assert "nan" in str(ranks.run(row.num_ranks, train, row, True, OnePool))


@pytest.mark.parametrize("name", some(SMALL, "zb-h1 fused", "zb-v exact"))
def test_one_slot_too_few_is_wrong(ranks: RankPool, name: str) -> None:
    row = ROWS[name]
    assert "nan" in str(ranks.run(row.num_ranks, train, row, True, StandInPool, one_slot_less))


def test_graphs_end_with_their_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.zero_bubble.engine.wgrad.accumulate import GradAccumulator
    from megatron.zero_bubble.engine.wgrad.store import WgradStore
    from megatron.zero_bubble.integration.adapter import stage_graphs

    monkeypatch.setattr(stage_graphs, "_layers_of", lambda chunk: chunk.layers)
    accumulate = GradAccumulator()
    part = stage_graphs.StageGraphs(WgradStore(accumulate), accumulate)
    config = SimpleNamespace(cuda_graph_impl="local", cuda_graph_warmup_steps=1)
    iteration: Any = SimpleNamespace(forward_only=False, call=SimpleNamespace(step=SimpleNamespace(config=config)))
    chunk: Any = torch.nn.Module()
    chunk.layers = torch.nn.Linear(2, 2)
    alive = weakref.ref(chunk)
    part.stages(iteration, [SimpleNamespace(model=chunk)])  # type: ignore[list-item]
    with part.iteration(iteration):
        assert len(part._blocks) == 1 and "forward" in vars(chunk.layers)
    del chunk
    gc.collect()
    assert alive() is None and not part._blocks


def test_recomputation_needs_random_states_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.tensor_parallel import random

    from megatron.zero_bubble.engine.wgrad.accumulate import GradAccumulator
    from megatron.zero_bubble.engine.wgrad.store import WgradStore
    from megatron.zero_bubble.integration.adapter.stage_graphs import StageGraphs

    accumulate = GradAccumulator()
    part, schedule = StageGraphs(WgradStore(accumulate), accumulate), build("zb-h1", num_ranks=2, num_microbatches=2)
    config = SimpleNamespace(cuda_graph_impl="local", recompute_granularity="selective")
    since_0_16 = "is_graph_safe_cuda_rng_tracker"
    monkeypatch.setattr(random, since_0_16, None, raising=False)
    part.check(config, schedule)
    monkeypatch.delattr(random, since_0_16)
    with pytest.raises(UserError, match="with recomputation need megatron-core 0.16 .* got .*'selective'; upgrade it"):
        part.check(config, schedule)
    part.check(SimpleNamespace(cuda_graph_impl="none", recompute_granularity="selective"), schedule)


def said(rank: int) -> dict[str, str]:
    """The refusals of models that graphs would not repeat faithfully."""
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
