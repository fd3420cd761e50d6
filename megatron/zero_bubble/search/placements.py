"""The placements that a search compares: one stage per rank, a V, loops and waves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.ir import Placement
from megatron.zero_bubble.ir.sizes import check_size

PlacementChoice = Literal["linear", "vee", "loop", "wave", "auto"]
NumChunks = int | Literal["auto"] | None
"""The stages per rank: a number, ``auto`` for the best of a few, or None for what a placement has without a choice."""

PLACEMENTS: dict[PlacementChoice, Callable[[int], Placement]] = {"linear": Placement.linear, "vee": Placement.vee}
"""The placement for a number of ranks, for each choice that says how many stages a rank has."""
_FIXED = {"linear": 1, "vee": 2}
_LOOPS, _WAVES = (2, 3, 4), (4, 6)
"""Stages per rank that ``auto`` tries; a wave of two is the V."""


def placements(choice: PlacementChoice, num_ranks: int, num_chunks: NumChunks = None) -> tuple[Placement, ...]:
    """Return the placements that ``choice`` and ``num_chunks`` stand for, each once, from few stages to many.

    ``loop`` and ``wave`` have ``num_chunks`` stages per rank, or each of a few numbers with ``auto`` or None. ``auto``
    stands for one stage per rank and a V; with a number of stages also for a loop and a wave of so many, and with
    ``auto`` stages for a few of both.

    Raises:
        UserError: for a number of stages that the placement cannot have.
    """
    own = _FIXED.get(choice)
    if isinstance(num_chunks, int):
        check_size(num_ranks, num_chunks=num_chunks)
        if num_chunks != (own or num_chunks):
            raise UserError(
                f"the placement {choice!r} has {own} stage(s) per rank; got {num_chunks}; leave the number out, or use "
                "a loop or a wave"
            )
    if own is not None:
        return (PLACEMENTS[choice](num_ranks),)
    return tuple(dict.fromkeys(_all(choice, num_ranks, num_chunks)))


def _all(choice: PlacementChoice, num_ranks: int, num_chunks: NumChunks) -> Iterator[Placement]:
    if choice == "auto":
        yield from (place(num_ranks) for place in PLACEMENTS.values())
        if num_chunks is None:
            return
    if isinstance(num_chunks, int):
        if choice != "wave":
            yield Placement.interleaved(num_ranks, num_chunks)
        if choice == "wave" or (choice == "auto" and num_chunks % 2 == 0):
            yield Placement.wave(num_ranks, num_chunks)
        return
    if choice != "wave":
        yield from (Placement.interleaved(num_ranks, each) for each in _LOOPS)
    if choice == "wave":
        yield Placement.vee(num_ranks)
    if choice != "loop":
        yield from (Placement.wave(num_ranks, each) for each in _WAVES)
