"""The limit on sizes, checked before anything of that size is made."""

from __future__ import annotations

from megatron.zero_bubble.core.errors import UserError

MOST_FORWARDS = 2_000_000
"""More forwards than a pipeline has in practice; a plan of so many takes minutes and gigabytes."""
MOST_LAYERS = 10_000
"""More layers than a model has in practice."""
_MOST_SHOWN = 10**18


class TooLarge(UserError):
    """A schedule that a job may run, but that is too large to be planned."""


def check_size(num_ranks: int, num_microbatches: int = 1, num_chunks: int = 1, num_slices: int = 1) -> None:
    """Check that a schedule of this size is small enough to be planned; counts below 1 are checked elsewhere.

    Args:
        num_chunks: stages per rank.
        num_slices: slices per sequence.

    Raises:
        TooLarge: for more than ``MOST_FORWARDS`` forwards.
    """
    sizes = num_ranks, num_chunks, num_microbatches, num_slices
    forwards = 1
    for size in sizes:
        forwards *= max(1, size)
    if forwards > MOST_FORWARDS:
        raise TooLarge(
            f"ranks x stages per rank x microbatches x slices must be at most {MOST_FORWARDS:,}; got "
            f"{' x '.join(map(_shown, sizes))}; give smaller numbers (more microbatches only repeat the steady state)"
        )


def check_layers(name: str, num_layers: int) -> None:
    """Check that ``num_layers``, given as ``name``, are few enough; counts below 1 are checked elsewhere.

    Raises:
        UserError: for more than ``MOST_LAYERS``.
    """
    if num_layers > MOST_LAYERS:
        raise UserError(f"{name} must have at most {MOST_LAYERS:,} layers; got {_shown(num_layers)}; give fewer")


def _shown(size: int) -> str:
    """Format a number; Python does not convert one of thousands of digits."""
    return f"{size:,}" if abs(size) < _MOST_SHOWN else f"more than {_MOST_SHOWN:,}"
