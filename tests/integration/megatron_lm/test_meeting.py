"""A problem of one rank ends all ranks, but only after all have met."""

from __future__ import annotations

from tests.helpers.ranks import RankPool


def raised(rank: int, problems: list[str]) -> str:
    """Report ``problems[rank]``, if not empty, before the meeting; return the error that the meeting raises."""
    from megatron.zero_bubble.core.errors import UserError
    from megatron.zero_bubble.integration.megatron_lm.meeting import Meeting

    meeting = Meeting()
    with meeting.reporting():
        if problems[rank]:
            raise UserError(problems[rank])
    try:
        meeting.hold()
    except UserError as error:
        return str(error)
    return ""


def test_every_rank_raises_the_first_ranks_problem(ranks: RankPool) -> None:
    assert ranks.run(2, raised, ["", "no documents"]) == ["no documents"] * 2
    assert ranks.run(2, raised, ["no folder", "no documents"]) == ["no folder"] * 2
    assert ranks.run(2, raised, ["", ""]) == ["", ""]
