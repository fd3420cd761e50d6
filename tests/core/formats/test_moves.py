"""The moves of a plan file are read as they were written, and errors state rule, value and remedy."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron.zero_bubble import build, simulate
from megatron.zero_bubble.core.costs.even import even_costs
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.moves import moves_content
from megatron.zero_bubble.core.formats.plan import PlanFile, plan_from_json, plan_to_json
from megatron.zero_bubble.core.plan import Additions, plan_of
from megatron.zero_bubble.core.plan.offload import select_longest

SCHEDULE = build("zb-h2", num_ranks=2, num_microbatches=4)


def written(content: dict[str, Any]) -> str:
    return plan_to_json(simulate(SCHEDULE, even_costs(SCHEDULE.placement)), more=content)


def test_moves_are_read_as_written() -> None:
    moves = tuple(move._replace(after=1) for move in select_longest(SCHEDULE, 0.5))
    assert plan_from_json(written(moves_content(moves))) == PlanFile(SCHEDULE, added=Additions(moves=moves))
    assert plan_from_json(written({})) == PlanFile(SCHEDULE)


def test_moves_that_just_fit_can_be_lowered() -> None:
    """Between 0F0 and 0B0 of ZB-H2 on two ranks are two passes, 0F1 and 0F2."""
    moves = plan_from_json(written({"moves": [["0F0", 1, 1, 0]]})).added.moves
    assert plan_of(SCHEDULE, Additions(moves=tuple(moves))).ops


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        ("all", r"moves .*must be a list of \[\"0F0\", after, out, back\] with numbers of passes"),
        ([["0F0", 0, 1]], "with numbers of passes"),
        ([["0F0", 0, -1, 1]], "with numbers of passes"),
        ([["0F9", 0, 1, 1]], "must list forwards of the schedule that have a backward; got 0F9; remove it"),
        ([["0B0", 0, 1, 1]], "must list forwards of the schedule that have a backward; got 0B0; remove it"),
        ([["0F0", 0, 0, 0]] * 2, "must list a forward once; got 0F0 twice; remove one of them"),
        ([["0F0", 9, 1, 1]], "0F0 has 2 passes between them and needs 11; lower the numbers of passes in moves"),
    ],
)
def test_invalid_moves_are_rejected(moves: Any, message: str) -> None:
    text = json.dumps(json.loads(written({})) | {"moves": moves})
    with pytest.raises(UserError, match=message):
        plan_from_json(text)
