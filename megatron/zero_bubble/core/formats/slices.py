"""The cuts of sequences in JSON files: ``num_slices``, and ``slice_shares`` if the slices are not equally long."""

from __future__ import annotations

from typing import Any

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.files import read_key
from megatron.zero_bubble.core.ir import Slices
from megatron.zero_bubble.core.ir.slices import MOST_SLICES


def slices_content(slices: Slices) -> dict[str, Any]:
    """The keys for ``slices``; none for whole sequences."""
    if len(slices) == 1:
        return {}
    return {"num_slices": len(slices)} | ({} if slices.are_even else {"slice_shares": slices.shares})


def slices_from(content: dict[str, Any]) -> Slices | None:
    """Read what ``slices_content`` wrote; None without the keys.

    Raises:
        UserError: for keys of another form, or that contradict each other.
    """
    shares = None
    if "slice_shares" in content:
        shares = tuple(map(float, read_key(content, "slice_shares", "a list of numbers from 0 to 1", _is_shares)))
    if "num_slices" not in content:
        return None if shares is None else Slices(shares)
    number = read_key(content, "num_slices", f"a number from 1 to {MOST_SLICES}", _is_number)
    if shares is not None and len(shares) != number:
        raise UserError(f"slice_shares must have one number per slice; got {len(shares)} for {number} slices")
    return Slices.even(number) if shares is None else Slices(shares)


def _is_number(value: object) -> bool:
    return type(value) is int and 1 <= value <= MOST_SLICES


def _is_shares(value: object) -> bool:
    return isinstance(value, list) and all(type(share) in (int, float) and 0 <= share <= 1 for share in value)
