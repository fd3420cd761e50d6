"""The forwards that move to host memory, in a plan's JSON."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.files import is_text, list_of, read_optional
from megatron.zero_bubble.core.ir import Pass, Schedule
from megatron.zero_bubble.core.plan.offload import Lifespan, Move, lifespans

OFFLOAD = "offload"
MOVES = "moves"


def moves_content(moves: Collection[Move]) -> dict[str, Any]:
    """Return the key of the plan's JSON for what moves."""
    return {MOVES: [[str(move.forward), move.after, move.out, move.back] for move in moves]}


def offload_from(content: Mapping[str, Any]) -> str | None:
    """Read the choice for which the plan moves something; None if the key is missing.

    Raises:
        UserError: for anything but a string.
    """
    choice: str | None = read_optional(content, OFFLOAD, "a string, such as auto", is_text)
    return choice


def moves_from(content: Mapping[str, Any], schedule: Schedule) -> tuple[Move, ...]:
    """Read what moves in ``schedule``; nothing if the key is missing.

    Raises:
        UserError: for another form, a pass that is not a forward of the schedule or is listed twice, or copies that do
            not fit between a forward and its backward.
    """
    rows = read_optional(content, MOVES, 'a list of ["0F0", after, out, back] with numbers of passes', list_of(_is_row))
    spans = {str(span.forward): span for row in schedule.order for span in lifespans(row)}
    moves: dict[Pass, Move] = {}
    for text, after, out, back in rows or ():
        if text not in spans:
            raise UserError(f"{MOVES} must list forwards of the schedule that have a backward; got {text}; remove it")
        move = Move(spans[text].forward, out, back, after)
        if move.forward in moves:
            raise UserError(f"{MOVES} must list a forward once; got {text} twice; remove one of them")
        _check_fits(move, spans[text])
        moves[move.forward] = move
    return tuple(moves.values())


def _check_fits(move: Move, span: Lifespan) -> None:
    places = move.places(span)
    if places.release > places.fetch:
        raise UserError(
            f"the copies of a move must fit between its forward and its backward; {move.forward} has "
            f"{span.length - 1} passes between them and needs {move.after + move.out + move.back}; lower the "
            f"numbers of passes in {MOVES}"
        )


def _is_row(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 4:
        return False
    return isinstance(value[0], str) and all(type(number) is int and number >= 0 for number in value[1:])
