"""Tests of which values of ``ZeroBubbleConfig`` can be combined."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble import build, simulate
from megatron.zero_bubble.formats.moves import moves_content
from megatron.zero_bubble.formats.plan import plan_to_json
from megatron.zero_bubble.ir import Kind, Pass
from megatron.zero_bubble.job.config import ZeroBubbleConfig
from megatron.zero_bubble.plan.offload import Move
from megatron.zero_bubble.planning.source import even_costs


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"costs_file": "x"}, "costs_file='x' applies only to zero-pp without unit_microbatches, .* got zb-h1; leave"),
        ({"memory_limit": "0.25p"}, "memory_limit='0.25p' applies only to zb-auto, .* fixed peak; leave it out"),
        ({"placement": "vee"}, "placement='vee' applies only to zb-auto"),
        ({"rollback": "inverse"}, "rollback='inverse' has no effect without post_validation"),
        ({"host_memory": "1GiB"}, "host_memory=1GiB with offload=none, which moves nothing; leave it out, or give"),
        ({"unit_microbatches": 4}, "unit_microbatches is for a schedule of units, .* got 4 with zb-h1; leave it out"),
        (
            {"whole_stages": 2},
            "whole_stages must be 1 or more, and needs shard_weights; got 2 with shard_weights=False",
        ),
        ({"unit_microbatches": 0, "shard_weights": True}, "unit_microbatches must be 1 or more; got 0"),
        ({"shard_weights": True, "post_validation": True}, "got shard_weights with post_validation; leave one of them"),
        ({"shard_weights": True, "wgrad_stream": True}, "got shard_weights with wgrad_stream; leave one of them out"),
        ({"offload": "some"}, "the share to offload is all, none or a percentage up to 100%"),
        ({"offload": "all", "host_memory": "2p"}, "an amount of memory is written like 60GiB; got '2p'"),
    ],
)
def test_options_without_effect_are_rejected(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ZeroBubbleConfig("zb-h1", **options)


def test_offloading_excludes_a_stream_for_weight_gradients() -> None:
    with pytest.raises(ValueError, match="got wgrad_stream with offload=50%; leave one of them out"):
        ZeroBubbleConfig("zb-h1", offload="50%", wgrad_stream=True)


def test_moves_of_a_schedule_file_are_checked_as_offloading(tmp_path: Path) -> None:
    schedule = build("zb-h1", num_ranks=2, num_microbatches=4)
    timeline = simulate(schedule, even_costs(schedule.placement))
    plain, moving = (str(tmp_path / name) for name in ("plain.json", "moving.json"))
    Path(plain).write_text(plan_to_json(timeline))
    move = Move(Pass(0, Kind.F, 1))
    Path(moving).write_text(plan_to_json(timeline, more=moves_content([move])))
    config = ZeroBubbleConfig(schedule_file=moving, host_memory="1GiB")
    select = config.selection(config.sources()(2))
    assert select is not None and select(schedule) == (move,)
    with pytest.raises(ValueError, match="offload must be that of the schedule file, what it lists; got none with"):
        ZeroBubbleConfig(schedule_file=moving, offload="none")
    with pytest.raises(ValueError, match="got wgrad_stream with offload=the moves of the schedule file"):
        ZeroBubbleConfig(schedule_file=moving, wgrad_stream=True)
    with pytest.raises(ValueError, match="host_memory=1GiB with offload=none, which moves nothing"):
        ZeroBubbleConfig(schedule_file=plain, host_memory="1GiB")
