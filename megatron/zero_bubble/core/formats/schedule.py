"""A schedule in the JSON of plans and traces, and what a plan adds to its passes: all that a run takes from such a file
but the layout of its layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from megatron.zero_bubble.core.analysis.validate import validate
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.files import is_positive, is_text, is_true, list_of, read_key, read_optional
from megatron.zero_bubble.core.formats.moves import moves_from
from megatron.zero_bubble.core.ir import Placement, Schedule, Slices
from megatron.zero_bubble.core.ir.schedule import chain_of
from megatron.zero_bubble.core.ir.sizes import check_size
from megatron.zero_bubble.core.ir.slices import MOST_SLICES
from megatron.zero_bubble.core.ir.vocabulary import FLOWS, Algorithm, Divided, algorithm_of
from megatron.zero_bubble.core.plan.plan_of import Additions
from megatron.zero_bubble.core.plan.shard import Sharding, check_chunks

SHARD_WEIGHTS = "shard_weights"
_NUMBER = "num_slices"
_SHARES = "slice_shares"
_ALGORITHM = "vocabulary"
_AGAIN = "recompute_logits"
_OVERLAPS = "overlap_experts"
_UNIT, _WHOLE = "unit_microbatches", "whole_stages"


def schedule_content(schedule: Schedule) -> dict[str, Any]:
    """Return the keys of a plan's schedule."""
    return {
        "schedule": schedule.name,
        "num_ranks": schedule.num_ranks,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        "stage_to_rank": schedule.placement.stage_to_rank,
        **passes_content(schedule),
        "order": schedule.to_text(),
        **({_OVERLAPS: True} if schedule.overlap_experts else {}),
    }


def passes_content(schedule: Schedule) -> dict[str, Any]:
    """Return what says of which slices and of which vocabulary the passes are; nothing for whole ones."""
    slices, algorithm = schedule.slices, algorithm_of(schedule)
    return {
        **({} if len(slices) == 1 else {_NUMBER: len(slices)}),
        **({} if slices.are_even else {_SHARES: slices.shares}),
        **({} if algorithm is None else {_ALGORITHM: algorithm}),
    }


def schedule_from(content: dict[str, Any]) -> Schedule:
    """Read and validate what ``schedule_content`` wrote.

    Raises:
        UserError: for keys of another form, or that contradict each other; a ``ScheduleError``, with the grid, when the
            order is invalid.
    """
    name = read_key(content, "schedule", "a string", is_text)
    num_microbatches = read_key(content, "num_microbatches", "a whole number above 0", is_positive)
    stage_to_rank = read_key(content, "stage_to_rank", "a list of ranks", list_of(_is_rank))
    rows = read_key(content, "order", 'one list per rank, of passes such as "0F0"', list_of(list_of(is_text)))
    flat = Schedule.from_text(name, Placement(tuple(stage_to_rank)), num_microbatches, rows)
    schedule = with_passes_of(content, flat)
    for key, value in (("num_ranks", schedule.num_ranks), ("num_stages", schedule.num_stages)):
        if content.get(key, value) != value:
            raise UserError(f"{key} must agree with stage_to_rank, which gives {value}; got {content[key]!r}")
    validate(schedule)
    return schedule


def with_passes_of(content: Mapping[str, Any], schedule: Schedule) -> Schedule:
    """Return a schedule, of which only the order has been read, with what else a file says of its passes.

    Raises:
        UserError: for keys of another form, or that contradict each other or the order.
    """
    # Every slice has an F, so the order gives the number of slices; only uneven cuts need a key.
    number = 1 + max((p.slice for p in schedule.passes()), default=0)
    chunks = -(-schedule.num_stages // schedule.num_ranks)
    check_size(schedule.num_ranks, schedule.num_microbatches, chunks, number)
    slices, algorithm = _slices_from(content) or Slices.even(number), _algorithm_from(content)
    if len(slices) != number:
        raise UserError(f"{_NUMBER} must agree with the order, which has {number}; got {len(slices)}")
    flow = chain_of if algorithm is None else FLOWS[algorithm]
    return replace(schedule, slices=slices, make_flow=flow, overlap_experts=is_true(content, _OVERLAPS))


def logits_content(divided: Divided | None) -> dict[str, Any]:
    """Return the key of a plan that computes its logits again; nothing for others."""
    return {_AGAIN: True} if divided is not None and divided.recompute_logits else {}


def divided_from(content: Mapping[str, Any]) -> Divided | None:
    """Read how the vocabulary is divided; None if it is not.

    Raises:
        UserError: for keys of another form, or logits of an undivided vocabulary.
    """
    algorithm, again = _algorithm_from(content), is_true(content, _AGAIN)
    if again and algorithm is None:
        raise UserError(
            f"{_AGAIN} needs passes of a divided vocabulary and the key {_ALGORITHM}, which is missing; remove {_AGAIN}"
        )
    return None if algorithm is None else Divided(algorithm, again)


def sharding_content(sharding: Sharding) -> dict[str, Any]:
    """Return the keys of a plan with sharded units."""
    return {SHARD_WEIGHTS: True, _UNIT: sharding.unit_microbatches, _WHOLE: sharding.open_chunks}


def additions_from(content: Mapping[str, Any], schedule: Schedule) -> Additions:
    """Read what a plan adds to its passes: moves to host memory, and sharded units.

    Raises:
        UserError: for keys of another form, moves that do not fit, or sharded units of one stage per rank.
    """
    moves = moves_from(content, schedule)
    if not is_true(content, SHARD_WEIGHTS):
        return Additions(moves=moves)
    check_chunks(schedule.placement)
    unit, whole = (read_key(content, key, "a whole number above 0", is_positive) for key in (_UNIT, _WHOLE))
    return Additions(moves=moves, sharding=Sharding(unit, whole))


def additions_in_words(added: Additions, divided: Divided | None) -> tuple[str, ...]:
    """What a run takes from a plan besides the schedule and its layers."""
    words = ("moves", added.moves), ("sharded units", added.sharding), ("recomputed logits", logits_content(divided))
    return tuple(name for name, is_added in words if is_added)


def _slices_from(content: Mapping[str, Any]) -> Slices | None:
    """The cuts of the sequences; None without their keys."""
    shares = read_optional(content, _SHARES, "a list of numbers from 0 to 1", list_of(_is_share))
    form = f"a number from 1 to {MOST_SLICES}"
    number = read_optional(content, _NUMBER, form, lambda v: type(v) is int and 1 <= v <= MOST_SLICES)
    if shares is not None and number not in (None, len(shares)):
        raise UserError(f"{_SHARES} must have one number per slice; got {len(shares)} for {number} slices")
    if shares is not None:
        return Slices(tuple(map(float, shares)))
    return None if number is None else Slices.even(number)


def _algorithm_from(content: Mapping[str, Any]) -> Algorithm | None:
    """The algorithm of vocabulary parallelism; None if the schedule is without it."""
    form = "the algorithm of its vocabulary passes, 1 or 2"
    algorithm = read_optional(content, _ALGORITHM, form, lambda v: type(v) is int and v in FLOWS)
    return cast(Algorithm | None, algorithm)


def _is_rank(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_share(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1  # type: ignore[operator]
