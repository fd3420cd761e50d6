"""The layers of every stage that a job gets."""

from __future__ import annotations

from argparse import Namespace

import pytest

from megatron.zero_bubble import Placement
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.planning.division import Division
from megatron.zero_bubble.planning.job.model import division_of

LINEAR, VEE, LOOP = Placement.linear(4), Placement.vee(4), Placement.interleaved(4, 3)


def job(num_layers: int, **flags: object) -> Division:
    given = dict.fromkeys(
        (
            "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
            "pipeline_model_parallel_layout",
        )
    )
    return division_of(Namespace(num_layers=num_layers, **{**given, **flags}), None)


def test_flags_are_followed_as_megatron_deals_layers_over_chunks() -> None:
    ends = job(32, num_layers_in_first_pipeline_stage=6, num_layers_in_last_pipeline_stage=6)
    assert ends.on(LINEAR) == (6, 10, 10, 6)
    assert ends.on(VEE) == (3, 5, 5, 3, 3, 5, 5, 3), "stages 0 and 4 are of the first rank of a loop"
    assert job(24).on(LOOP) == (2,) * 12
    counted = job(14, account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True)
    assert counted.on(VEE) == (1, 2, 2, 2, 2, 2, 2, 1)
    assert all(each.needed_layout(VEE) is None for each in (ends, counted))


def test_layers_that_flags_cannot_divide_are_divided_without_them() -> None:
    equal = job(32, num_layers_in_first_pipeline_stage=7)
    assert equal.on(VEE) == (4,) * 8 and equal.needed_layout(VEE) == "Et*4|(t*4|)*6t*4L"
    uneven = job(14, num_layers_in_first_pipeline_stage=3, num_layers_in_last_pipeline_stage=3)
    assert (uneven.on(LINEAR), uneven.needed_layout(LINEAR)) == ((3, 4, 4, 3), None)
    assert (uneven.on(VEE), uneven.needed_layout(VEE)) == ((1, 2, 2, 2, 2, 2, 2, 1), "Et|(tt|)*6tL")
    with pytest.raises(UserError, match="4 layers with embedding and loss do not fill 8 pipeline stages"):
        job(4).on(VEE)


def test_a_known_layout_is_that_of_its_number_of_stages() -> None:
    layout = job(8, pipeline_model_parallel_layout="Et*3|t*3|t|tL")
    assert (layout.on(LINEAR), layout.needed_layout(LINEAR)) == ((3, 3, 1, 1), None)
    assert layout.on(VEE) == (1,) * 8
    assert Division(8, given=(3, 3, 1, 1)).on(LINEAR) == (3, 3, 1, 1)
