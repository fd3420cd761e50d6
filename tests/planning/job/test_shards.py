"""Which jobs can shard their weights."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.core.plan.shard import check_chunks
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig
from megatron.zero_bubble.planning.job.flags import parse_ours


def test_one_stage_per_rank_is_refused() -> None:
    check_chunks(Placement.interleaved(2, 2))
    with pytest.raises(UserError, match="sharded units need 2 or more stages per rank, .* got 1; choose a schedule"):
        check_chunks(Placement.linear(2))


@pytest.mark.parametrize("text", ["0", "-1", "two", ""])
def test_unit_must_be_a_number_or_auto(text: str) -> None:
    with pytest.raises(UserError, match="a unit has 1 or more microbatches, or auto; got"):
        parse_ours([f"--zero-bubble-unit-microbatches={text}"])


def test_flags_become_a_configuration() -> None:
    sharded = "--zero-bubble-schedule zero-pp --zero-bubble-shard-weights --zero-bubble-unit-microbatches"
    for text, unit in (("6", 6), ("auto", None)):
        config = ZeroBubbleConfig.of(parse_ours(f"{sharded} {text}".split())[0])
        assert config.shard_weights and config.unit_microbatches == unit
        assert config.sharding(4).unit_microbatches == (unit or 1)  # chosen units of zero-pp end by themselves
        row = config.sources()(2).make(12).order[0]
        assert [p.microbatch for p in row if p.stage == 0][: unit or 2] == list(range(unit or 2))
