"""The stages that a run of Megatron-Bridge gets, by its model configuration and the schedule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.integration.bridge.stages import place
from megatron.zero_bubble.planning.job.environment import flags_in


def configured(**fields: Any) -> Any:
    unset = dict.fromkeys(
        (
            "virtual_pipeline_model_parallel_size",
            "pipeline_model_parallel_layout",
            "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage",
            "mtp_num_layers",
        )
    )
    counted = {"account_for_embedding_in_pipeline_split": False, "account_for_loss_in_pipeline_split": False}
    plain: dict[str, Any] = {"pipeline_model_parallel_size": 2, "num_layers": 8, "overlap_p2p_comm": False}
    return SimpleNamespace(**{**plain, **unset, **counted, **fields})


def placed(schedule: str, variables: tuple[str, ...] = (), **fields: Any) -> tuple[int | None, Any, int]:
    """Return the virtual size and the layout that the configuration then has, and the number of stages."""
    model = configured(**fields)
    _, source = place(model, flags_in({"ZERO_BUBBLE_SCHEDULE": schedule, **dict.fromkeys(variables, "1")}), 60.0)
    return model.virtual_pipeline_model_parallel_size, model.pipeline_model_parallel_layout, source.placement.num_stages


ROWS = [["embedding", "decoder"], ["decoder"] * 2, ["decoder"] * 3, ["decoder"] * 2 + ["loss"]]


@pytest.mark.parametrize(
    ("schedule", "fields", "expected"),
    [
        ("zb-h1", {}, (None, None, 2)),
        ("zb-h1", {"hybrid_layer_pattern": "M*M-|M-M*", "num_layers": None}, (None, None, 2)),
        ("zb-v", {}, (2, None, 4)),
        ("zb-v", {"virtual_pipeline_model_parallel_size": 2}, (2, None, 4)),
        ("zb-v", {"num_layers_in_first_pipeline_stage": 2}, (2, None, 4)),
        ("zb-v", {"num_layers": 7, "account_for_loss_in_pipeline_split": True}, (2, None, 4)),
        ("zb-v", {"num_layers": 9}, (None, "Ett|t*3|tt|ttL", 4)),
        ("zb-v", {"pipeline_model_parallel_layout": "Et|t*2|t*3|t*2L"}, (None, "Et|t*2|t*3|t*2L", 4)),
        ("zb-v", {"pipeline_model_parallel_layout": ROWS}, (None, ROWS, 4)),
        ("interleaved-1f1b", {"virtual_pipeline_model_parallel_size": 4}, (4, None, 8)),
    ],
)
def test_the_configuration_gets_the_stages_of_the_schedule(schedule: str, fields: Any, expected: Any) -> None:
    assert placed(schedule, **fields) == expected


@pytest.mark.parametrize(
    ("schedule", "fields", "message"),
    [
        ("zb-h1", {"pipeline_model_parallel_size": 1}, "needs a pipeline of 2 or more ranks"),
        ("zb-h1", {"virtual_pipeline_model_parallel_size": 2}, "has one stage per rank; got 2; leave the number out"),
        (
            "zb-v",
            {"pipeline_model_parallel_layout": "Ett|t|tt|ttt|t|tL"},
            "has 2 stages per rank, the layout of the job 3; give a layout of 4 stages",
        ),
        (
            "zb-v",
            {"hybrid_layer_pattern": "M*M-|M-M*"},
            "this schedule needs 4 of them; got 'M.*choose a schedule with",
        ),
    ],
)
def test_other_stages_are_refused(schedule: str, fields: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        placed(schedule, **fields)


def test_pairs_of_a_hybrid_model_are_refused_with_a_remedy_that_helps() -> None:
    """One stage per rank would not make them possible."""
    with pytest.raises(UserError, match="need hybrid_layer_pattern=None, because .*; train without pairs"):
        placed("dualpipe-v", ("ZERO_BUBBLE_OVERLAP_EXPERTS",), hybrid_layer_pattern="M*M-|M-M*")
