"""Tests of which values of ``ZeroBubbleConfig`` can be combined."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble import build, simulate
from megatron.zero_bubble.core.costs.even import even_costs
from megatron.zero_bubble.core.formats.moves import moves_content
from megatron.zero_bubble.core.formats.plan import plan_to_json
from megatron.zero_bubble.core.ir import Kind, Pass
from megatron.zero_bubble.core.plan.offload import Move
from megatron.zero_bubble.planning.decisions import DECISIONS
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({}, "a configuration needs schedule or schedule_file; got neither"),
        (
            {"schedule": "zb-h1", "whole_stages": 0},
            "whole_stages must be positive; got 0",
        ),
        ({"schedule": "zb-h1", "peer_timeout_s": float("nan")}, "peer_timeout_s must be positive; got nan"),
        ({"schedule": "zb-h1", "offload": "some"}, "the share to offload is all, none or a percentage up to 100%"),
        ({"schedule": "zb-h1", "offload": "all", "host_memory": "2p"}, "memory is written like 60GiB; got '2p'"),
        ({"schedule": "zb-h1", "offload": "0%", "host_memory": "2GiB"}, "host_memory=2GiB works only with offloading"),
    ],
)
def test_invalid_values_are_rejected(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ZeroBubbleConfig(**options)


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
    with pytest.raises(ValueError, match="offload must be that of the schedule file, its moves; got none with"):
        _ = ZeroBubbleConfig(schedule_file=moving, offload="none").setup
    assert ZeroBubbleConfig(schedule_file=moving, shard_weights=True).selection(config.sources()(2)) is not None
    with pytest.raises(ValueError, match="recompute_logits works only with vocabulary parallelism"):
        _ = ZeroBubbleConfig(schedule_file=plain, recompute_logits=True).setup
    with pytest.raises(ValueError, match="host_memory=1GiB works only with offloading"):
        _ = ZeroBubbleConfig(schedule_file=plain, host_memory="1GiB").setup


def test_exact_has_one_name_and_an_older_opposite() -> None:
    exact = ZeroBubbleConfig("zb-h1", exact=True)
    assert exact.setup == ZeroBubbleConfig("zb-h1", fuse_wgrad=False).setup and exact.setup.exact
    assert not ZeroBubbleConfig("zb-h1").setup.exact and replace(exact, schedule="zb-v").setup.exact


def test_every_keyword_is_a_flag_or_described() -> None:
    """The table describes the flags; the docstring of the configuration has only what differs."""
    flags = {row.name: row for row in DECISIONS}
    described = str(ZeroBubbleConfig.__doc__)
    for field in fields(ZeroBubbleConfig):
        row = flags.get(field.name)
        assert (row is not None and row.help) or f"{field.name}" in described, field.name
    places = {row.name for row in DECISIONS if row.path} - {"slices"}
    assert places <= {field.name for field in fields(ZeroBubbleConfig)}
