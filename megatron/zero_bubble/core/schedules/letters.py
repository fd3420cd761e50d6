"""Schedules written as letters.

A rank's row is a string such as ``"FFFBFBW"``. Each letter is the kind of a pass; its microbatch is the number of equal
letters before it, so no schedule numbers microbatches explicitly. With sequence slices, the letters count slices: those
of a microbatch go forward in order, and backward from the last to the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from megatron.zero_bubble.core.ir import WHOLE, Kind, Pass, Placement, Schedule, Slices


def forward_backward(num_microbatches: int, warmup: int) -> str:
    """F and B of one rank: warm-up forwards, then one F and one B in turn, then the remaining backwards.

    With fewer microbatches than ``warmup``, all forwards are in the warm-up.
    """
    warmup = min(warmup, num_microbatches)
    steady = num_microbatches - warmup
    return "F" * warmup + "FB" * steady + "B" * warmup


def delay_wgrad(letters: str, lag: int) -> str:
    """Add the W passes: each B after the first ``lag`` is followed by the oldest pending W, and the rest come last."""
    *before_each_b, after = letters.split("B")
    row = "".join(part + ("B" if k < lag else "BW") for k, part in enumerate(before_each_b))
    return row + after + "W" * min(lag, len(before_each_b))


def write(stage: int, letters: str, backward: Kind = Kind.B, num_slices: int = 1) -> tuple[Pass, ...]:
    """Convert letters to passes: the n-th of a kind is for microbatch n, or for slice n of all slices of the
    microbatches in the order of their forwards or backwards. ``backward`` is the kind of the letter B.
    """
    kinds = {"F": Kind.F, "B": backward, "W": Kind.W}
    cursor: Counter[str] = Counter()
    row = []
    for letter in letters:
        microbatch, slice_ = divmod(cursor[letter], num_slices)
        row.append(Pass(stage, kinds[letter], microbatch, slice_ if letter == "F" else num_slices - 1 - slice_))
        cursor[letter] += 1
    return tuple(row)


def linear(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    row: Callable[[int], str],
    backward: Kind = Kind.B,
    slices: Slices = WHOLE,
) -> Schedule:
    """Build a schedule with one stage per rank from ``row(rank)``, which returns the letters of a rank."""
    order = tuple(write(rank, row(rank), backward, len(slices)) for rank in range(num_ranks))
    return Schedule(name, Placement.linear(num_ranks), num_microbatches, order, slices)
