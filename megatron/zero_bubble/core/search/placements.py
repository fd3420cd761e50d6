"""The placements that a search compares: one stage per rank, a V, loops and waves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.core.ir.sizes import check_size

PlacementName = Literal["linear", "vee", "loop", "wave"]
PlacementChoice = PlacementName | Literal["auto"]
Placements = PlacementChoice | Sequence[Placement]
"""A choice by name, or the placements that it stands for."""
NumChunks = int | Literal["auto"] | None
"""The stages per rank: a number, ``auto`` for the best of a few, or None for what a placement has without a choice."""

PLACEMENTS: dict[PlacementName, Callable[[int, int], Placement]] = {
    "linear": lambda num_ranks, _: Placement.linear(num_ranks),
    "vee": lambda num_ranks, _: Placement.vee(num_ranks),
    "loop": Placement.interleaved,
    "wave": Placement.wave,
}
"""The placement for a number of ranks and of stages per rank, for each name."""
_FIXED: dict[PlacementName, int] = {"linear": 1, "vee": 2}
"""The stages per rank of placements that have no choice."""
HAS_CHUNKS = tuple(name for name in PLACEMENTS if name not in _FIXED)
"""The placements whose stages per rank are chosen."""
_LOOPS, _WAVES = (2, 3, 4), (4, 6)
"""Stages per rank that ``auto`` tries; a wave of two is the V."""


def placements(choice: Placements, num_ranks: int, num_chunks: NumChunks = None) -> tuple[Placement, ...]:
    """Return the placements that ``choice`` and ``num_chunks`` stand for, each once, from few stages to many.

    ``loop`` and ``wave`` have ``num_chunks`` stages per rank, or each of a few numbers with ``auto`` or None. ``auto``
    stands for one stage per rank and a V; with a number of stages also for a loop and a wave of so many, and with
    ``auto`` stages for a few of both.

    Raises:
        UserError: for a number of stages that the placement cannot have.
    """
    if not isinstance(choice, str):
        return tuple(choice)
    own = None if choice == "auto" else _FIXED.get(choice)
    if isinstance(num_chunks, int):
        if num_chunks < 1:
            raise UserError(f"num_chunks must be 1 or more; got {num_chunks}")
        check_size(num_ranks, num_chunks=num_chunks)
        if num_chunks != (own or num_chunks):
            raise UserError(
                f"the placement {choice!r} has {own} stage(s) per rank; got {num_chunks}; leave the number out, or use "
                "a loop or a wave"
            )
    if choice != "auto" and own is not None:
        return (PLACEMENTS[choice](num_ranks, own),)
    return tuple(dict.fromkeys(_all(choice, num_ranks, num_chunks)))


def name_of(placement: Placement) -> PlacementName | None:
    ranks = placement.num_ranks
    chunks, rest = divmod(placement.num_stages, ranks)
    names = (name for name in PLACEMENTS if not rest and (name != "wave" or chunks % 2 == 0))
    return next((name for name in names if PLACEMENTS[name](ranks, chunks) == placement), None)


def label_of(placement: Placement) -> str:
    """Return the name of a placement with its stages per rank where these are chosen, such as ``loop x4``."""
    name = name_of(placement)
    if name is None:
        return "another one"
    return f"{name} x{placement.num_stages // placement.num_ranks}" if name in HAS_CHUNKS else name


def _all(choice: PlacementChoice, num_ranks: int, num_chunks: NumChunks) -> Iterator[Placement]:
    if choice == "auto":
        yield from (PLACEMENTS[name](num_ranks, own) for name, own in _FIXED.items())
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
