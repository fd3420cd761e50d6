"""Cuts of sequences."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import WHOLE, Slices


def test_bounds_of_given_cuts() -> None:
    slices = Slices.of_tokens((20, 34, 42, 48))
    assert slices.in_tokens(48) == (20, 34, 42, 48)
    assert slices.bounds(1) == pytest.approx((20 / 48, 34 / 48))
    assert not slices.are_even and Slices.even(3).are_even
    assert WHOLE.bounds(0) == (0.0, 1.0)


def test_cuts_are_rounded_to_whole_blocks() -> None:
    assert Slices.even(3).in_tokens(128, 16) == (48, 80, 128)
    assert Slices((0.98, 0.01, 0.01)).in_tokens(64, 16) == (32, 48, 64), "no slice is empty"


@given(
    parts=st.lists(st.integers(1, 50), min_size=1, max_size=9), blocks=st.integers(9, 40), multiple=st.integers(1, 8)
)
def test_every_slice_has_a_block(parts: list[int], blocks: int, multiple: int) -> None:
    slices = Slices(tuple(part / sum(parts) for part in parts))
    ends = slices.in_tokens(blocks * multiple, multiple)
    assert ends[-1] == blocks * multiple
    assert all(end % multiple == 0 for end in ends)
    assert all(end > start for start, end in zip((0, *ends), ends, strict=False))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Slices.even(0), "the number of slices must be from 1 to 4096; got 0"),
        (lambda: Slices((0.5, 0.4)), "must be 1e-06 or more and add up to 1"),
        (lambda: Slices.of_tokens((8, 8)), "the ends of slices must increase from above 0"),
        (lambda: Slices.even(4).in_tokens(30, 4), "must be a multiple of 4 tokens; got 30; pad it"),
        (lambda: Slices.even(4).in_tokens(24, 8), "has at most 3 slices of 8 tokens each; got 4 slices"),
    ],
)
def test_wrong_cuts_are_refused(make: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()  # type: ignore[operator]
