"""Sequence slices: how the sequence of every microbatch is cut into parts that pass through the pipeline one by one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from megatron.zero_bubble.core.errors import UserError

MOST_SLICES = 4096
"""More slices than any sequence needs; a larger number is a mistake, which would take minutes to notice."""
_SHORTEST = 1e-6


@dataclass(frozen=True)
class Slices:
    """The cuts of a sequence; ``shares[i]`` is the share of the tokens in slice i.

    Raises:
        UserError: when a share is below a millionth, or the shares do not add up to 1.
    """

    shares: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        fit = self.shares and all(share >= _SHORTEST for share in self.shares) and abs(sum(self.shares) - 1) <= 1e-6
        if not fit:
            raise UserError(
                f"the shares of the slices of a sequence must be {_SHORTEST:g} or more and add up to 1; got "
                f"{list(self.shares)}"
            )

    def __len__(self) -> int:
        return len(self.shares)

    @classmethod
    def even(cls, num_slices: int) -> Slices:
        """Cut the sequence into ``num_slices`` equal slices.

        Raises:
            UserError: for fewer than one slice, or more than ``MOST_SLICES``.
        """
        if not 1 <= num_slices <= MOST_SLICES:
            raise UserError(f"the number of slices must be from 1 to {MOST_SLICES}; got {num_slices}")
        return cls((1 / num_slices,) * num_slices)

    @classmethod
    def of_tokens(cls, ends: Iterable[int]) -> Slices:
        """Cut the sequence behind the given numbers of tokens; the last one is the length of the sequence.

        Raises:
            UserError: unless the numbers increase and are above 0.
        """
        cuts = (0, *ends)
        if len(cuts) < 2 or any(start >= end for start, end in pairwise(cuts)):
            raise UserError(f"the ends of slices must increase from above 0; got {list(cuts[1:])}")
        return cls(tuple((end - start) / cuts[-1] for start, end in pairwise(cuts)))

    @cached_property
    def ends(self) -> tuple[float, ...]:
        """The end of each slice as a share of the sequence; the last is 1."""
        return (*tuple(accumulate(self.shares))[:-1], 1.0)

    def bounds(self, slice_: int) -> tuple[float, float]:
        """The start and the end of a slice as shares of the sequence."""
        return (self.ends[slice_ - 1] if slice_ else 0.0), self.ends[slice_]

    @property
    def are_even(self) -> bool:
        return max(self.shares) - min(self.shares) < 1e-9

    def in_tokens(self, seq_length: int, multiple: int = 1) -> tuple[int, ...]:
        """The ends of the slices in tokens: multiples of ``multiple`` that are nearest to the exact ends.

        Raises:
            UserError: when a slice would be empty, or the sequence is not a multiple of ``multiple``.
        """
        blocks = seq_length // multiple
        if seq_length % multiple:
            raise UserError(
                f"a sequence that is cut into slices must be a multiple of {multiple} tokens; got {seq_length}; pad it"
            )
        if len(self) > blocks:
            raise UserError(
                f"a sequence of {seq_length} tokens has at most {blocks} slices of {multiple} tokens each; "
                f"got {len(self)} slices; use fewer"
            )
        ends: list[int] = []
        for i, end in enumerate(self.ends):
            first, last = (ends[-1] if ends else 0) + 1, blocks - (len(self) - 1 - i)
            ends.append(min(max(round(end * blocks), first), last))
        return tuple(end * multiple for end in ends)


WHOLE = Slices()
"""One slice: the whole sequence."""
