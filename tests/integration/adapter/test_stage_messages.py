"""Stages that hand on something else than one hidden state per token have the gradients of the whole model."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.zero_bubble.core.errors import PeerError, UserError
from tests.helpers import stage_messages
from tests.helpers.ranks import RankPool
from tests.helpers.rows import some

ON_TWO = ("zb-v", "interleaved-1f1b")
ON_FOUR = ("zb-h1", "1f1b")
HEADERS = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
ROWS = {
    **{f"{kind}, 2 ranks": (kind, 2, ON_TWO, {}) for kind in stage_messages.KINDS},
    **{f"{kind}, 4 ranks": (kind, 4, ON_FOUR, {}) for kind in stage_messages.KINDS},
    **{f"{kind}, shapes in headers": (kind, 2, ON_TWO[:1], HEADERS) for kind in stage_messages.KINDS},
}


def both(_rank: int, kind: str, num_ranks: int, schedules: tuple[str, ...], more: dict[str, Any]) -> Any:
    whole = stage_messages.whole_gradients(kind)
    return whole, [stage_messages.gradients(schedule, kind, num_ranks, **more) for schedule in schedules]


@pytest.mark.parametrize("name", some(ROWS, *list(ROWS)[:3], "several, shapes in headers"))
def test_gradients_are_those_of_the_whole_model(ranks: RankPool, name: str) -> None:
    kind, num_ranks, schedules, more = ROWS[name]
    results = ranks.run(num_ranks, both, kind, num_ranks, schedules, more)
    whole = results[0][0]
    assert len(set(whole.values())) > 5, "the gradients differ from each other"
    for number in range(len(schedules)):
        found: dict[str, str] = {}
        for _, of_rank in results:
            found |= of_rank[number]
        assert found == whole


def refusal(_rank: int) -> str:
    """What is said of a model that declares other outputs than it has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(stage_messages.KINDS, "growing", stage_messages.losses)
        try:
            stage_messages.gradients("zb-v", "growing", 2)
        except (UserError, PeerError) as error:
            return str(error)
    return "trained"


def test_undeclared_outputs_are_refused_before_they_are_sent(ranks: RankPool) -> None:
    first, other = ranks.run(2, refusal)
    assert first.startswith(
        "the output of a stage must have the shape that its model declares, or else Megatron gives, because receives "
        "are posted for it; got (8, 2, 32) in float32 from 0F0 in place of (8, 2, 16) in float32 (tokens, "
    )
    assert "pipeline rank 0 ended with" in other or other == first
