"""Replicas with different numbers of microbatches, whose lengths only their senders know, have the gradients of equal
numbers; or they are refused, where these would differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.integration.adapter.equal_counts import together_in
from tests.helpers.ranks import RankPool
from tests.loops.models import destroy_groups, named
from tests.loops.varied import STAGES, batches, build, passes, shapes_of

full = pytest.mark.full
PIPELINE, REPLICAS = 2, 2
OWN = ((1, 5), (3, 1), (2, 6))
"""The numbers of microbatches of both replicas, in three steps. Reductions during the passes begin with the second."""


class Row(NamedTuple):
    """What two replicas train.

    Attributes:
        per_token: Megatron divides by the tokens of all replicas; without, the loop does, as those of reinforcement
            learning do, and multiplies by its own number of microbatches.
        overlaps: gradients are reduced during the passes.
        tells: the loop gives the lengths.
    """

    schedule: str
    kind: str
    model: str = "plain"
    per_token: bool = True
    overlaps: bool = False
    tells: bool = False


def gradients(rank: int, row: Row, schedule: str | None, own: Sequence[Sequence[int]]) -> list[dict[str, torch.Tensor]]:
    """Those of every step, without optimizer steps, on all stages; ``own`` are the numbers of both replicas."""
    from megatron.core import parallel_state, tensor_parallel

    import megatron.zero_bubble

    destroy_groups()
    if schedule is not None:
        megatron.zero_bubble.apply(megatron.zero_bubble.ZeroBubbleConfig(schedule=schedule, fuse_wgrad=False))
    virtual_size = STAGES.get(schedule or "")
    try:
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=PIPELINE,
            virtual_pipeline_model_parallel_size=virtual_size,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(7)
        options = {"calculate_per_token_loss": row.per_token}
        overlap = {"overlap_grad_reduce": row.overlaps, "bucket_size": 20 if row.overlaps else None}
        chunks = build(PIPELINE, virtual_size, row.kind, row.model, options, **overlap)
        if row.overlaps:
            no_syncs = [chunk.no_sync for chunk in chunks]
            chunks[0].config.no_sync_func = no_syncs if virtual_size else no_syncs[0]
        return [_step(row, chunks, step, own[step]) for step in range(len(own))]
    finally:
        megatron.zero_bubble.revert()
        destroy_groups()


def _step(row: Row, chunks: Sequence[Any], step: int, counts: Sequence[int]) -> dict[str, torch.Tensor]:
    from megatron.core import parallel_state

    import megatron.zero_bubble

    replica, every = parallel_state.get_data_parallel_rank(), batches(sum(counts), step, row.kind)
    first = sum(counts[:replica])
    data = every[first : first + counts[replica]]
    tokens = sum(sequences * length for sequences, length in shapes_of(every))
    for chunk in chunks:
        chunk.zero_grad_buffer()
    factor = None if row.per_token else len(data) * len(counts) / tokens
    with megatron.zero_bubble.shapes(shapes_of(data)) if row.tells else nullcontext():
        passes(chunks, data, factor)
    found = {name: each.main_grad.clone() for chunk in chunks for name, each in named(chunk.module)}
    parts: list[Any] = [None] * PIPELINE
    dist.all_gather_object(parts, found, group=parallel_state.get_pipeline_model_parallel_group())
    return {name: gradient for part in parts for name, gradient in part.items()}


def worst_differences(rank: int, row: Row) -> list[float]:
    """For each step, the largest difference to equal numbers under stock, relative to the largest of its weight."""
    equal = [(sum(counts) // REPLICAS,) * REPLICAS for counts in OWN]
    expected, got = gradients(rank, row, None, equal), gradients(rank, row, row.schedule, OWN)
    return [
        max(float((of[name] - every[name]).abs().max() / every[name].abs().max()) for name in every)
        for every, of in zip(expected, got, strict=True)
    ]


ROWS = [
    Row("zb-v", "packed", overlaps=True),
    *(
        pytest.param(row, marks=full)
        for row in (
            Row("zb-h1", "packed", per_token=False, overlaps=True),
            Row("zb-h1", "dense"),
            Row("zb-h2", "packed", overlaps=True),
            Row("zb-v", "dense", per_token=False),
            Row("zb-v", "packed", per_token=False, overlaps=True, tells=True),
            Row("zb-h1", "packed", overlaps=True, tells=True),
            Row("zb-h1", "dense", "experts"),
            Row("zb-v", "packed", "experts", overlaps=True),
            Row("zb-h1", "packed", "predictions"),
            Row("zb-v", "dense", "predictions", overlaps=True),
        )
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_gradients_are_those_of_equal_numbers(ranks: RankPool, row: Row) -> None:
    for worst in ranks.run(4, worst_differences, row, timeout=120):
        assert len(worst) == len(OWN)
        assert max(worst) <= 1e-6, worst


RULE = "must run the same number of microbatches per iteration, because each divides these losses by its own number"
LOSSES = {"experts": "aux_loss, z loss", "predictions": "multi-token prediction"}


EXPERTS = {"num_moe_experts": 4, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}


@pytest.mark.parametrize(
    ("options", "evaluates", "together"),
    [
        ({}, False, None),
        ({"calculate_per_token_loss": False}, False, None),
        (EXPERTS, False, None),
        ({**EXPERTS, "calculate_per_token_loss": False}, False, "auxiliary losses (aux_loss)"),
        ({**EXPERTS, "calculate_per_token_loss": False}, True, None),
        ({**EXPERTS, "calculate_per_token_loss": False, "moe_aux_loss_coeff": 0.0}, False, None),
        ({**EXPERTS, "expert_model_parallel_size": 2}, True, "share experts"),
        ({**EXPERTS, "moe_router_load_balancing_type": "global_aux_loss"}, False, "global_aux_loss"),
        (
            {
                **EXPERTS,
                "calculate_per_token_loss": False,
                "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
                "moe_aux_loss_coeff": [0.0, 0.1],
                "moe_z_loss_coeff": 0.01,
                "mtp_num_layers": 1,
            },
            False,
            "auxiliary losses (seq_aux_loss, z loss, multi-token prediction)",
        ),
    ],
)
def test_some_models_need_equal_numbers(options: dict[str, Any], evaluates: bool, together: str | None) -> None:
    config = SimpleNamespace(**{"calculate_per_token_loss": True, "moe_z_loss_coeff": None, **options})
    found = together_in(config, evaluates)
    assert (found is None) if together is None else found is not None and together in found.replicas


def refusal(rank: int, model: str, tells: bool) -> str:
    with pytest.raises(UserError) as caught:
        gradients(rank, Row("zb-h1", "dense", model, per_token=False, tells=tells), "zb-h1", [(2, 2), *OWN])
    return str(caught.value)


@pytest.mark.parametrize(
    ("model", "tells"),
    [("experts", False), *(pytest.param(*row, marks=full) for row in (("predictions", True), ("experts", True)))],
)
def test_auxiliary_losses_of_different_numbers_are_refused(ranks: RankPool, model: str, tells: bool) -> None:
    for said in ranks.run(4, refusal, model, tells):
        assert f"with auxiliary losses ({LOSSES[model]}) {RULE}; got 1, 5; give" in said
        assert said.endswith("or set calculate_per_token_loss=True, with which every token counts alike")
