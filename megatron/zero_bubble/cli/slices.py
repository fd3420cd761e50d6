"""Checks of the flags that cut sequences into slices."""

from __future__ import annotations

import argparse
from itertools import pairwise

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir.slices import MOST_SLICES
from megatron.zero_bubble.planning.offload import AUTO


def check_cuts(options: argparse.Namespace) -> None:
    """Check the flags.

    Raises:
        UserError: for flags of another form, or that contradict each other.
    """
    number, least, places = options.num_slices, options.min_slice_tokens, options.slice_cuts
    _check_number(number)
    if least is not None and number != AUTO:
        raise UserError(f"--min-slice-tokens applies only to --num-slices {AUTO}; leave it out")
    if least is not None and least < 1:
        raise UserError(f"--min-slice-tokens must be 1 or more; got {least}")
    if places in ("even", "balanced"):
        if number is None:
            raise UserError(f"--slice-cuts {places} needs a number of slices; add --num-slices")
    elif places is not None:
        count = _number_of_ends(places)
        if number not in (None, str(count)):
            raise UserError(
                f"--slice-cuts {places} has {count} ends; got --num-slices {number}; leave out --num-slices"
            )


def _check_number(text: str | None) -> None:
    if text in (None, AUTO):
        return
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number <= MOST_SLICES:
        raise UserError(f"--num-slices must be a number from 1 to {MOST_SLICES}, or {AUTO}; got {text}")


def _number_of_ends(text: str) -> int:
    try:
        ends = [float(end) for end in text.split(",")]
    except ValueError:
        ends = []
    if not ends or ends[-1] != 1 or any(not start < end for start, end in pairwise((0.0, *ends))):
        raise UserError(
            "--slice-cuts must be even, balanced, or the ends of the slices as increasing shares of the sequence, of "
            f"which the last is 1, such as 0.3,0.6,1; got {text}"
        )
    return len(ends)
