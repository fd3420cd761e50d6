"""Parse ``--data-path``: one prefix, several prefixes, or alternating weights and prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.zero_bubble.core.errors import UserError


@dataclass(frozen=True)
class Blend:
    """Data sets to sample from.

    Attributes:
        prefixes: paths without ``.bin``.
        weights: one weight per prefix, with any sum; None weights the data sets by their lengths.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None

    def for_core(self) -> tuple[list[str], list[float] | None]:
        """The pair that megatron-core's dataset configuration takes."""
        return list(self.prefixes), None if self.weights is None else list(self.weights)


def parse_blend(flag: str, values: Sequence[str]) -> Blend:
    """Read the values of ``flag``: ``P``, ``P Q ...`` or ``0.3 P 0.7 Q ...``.

    Raises:
        UserError: weights and prefixes do not alternate, or a weight is not positive.
    """
    numbers = [_number(value) for value in values]
    if all(number is None for number in numbers):
        return Blend(tuple(values), None)
    weights = [number for number in numbers[0::2] if number is not None]
    if len(values) % 2 or len(weights) * 2 != len(values) or any(number is not None for number in numbers[1::2]):
        raise UserError(
            f"{flag} takes prefixes, or a weight before every prefix, got {' '.join(values)}; add or drop weights"
        )
    if min(weights) <= 0:
        raise UserError(f"{flag} takes positive weights, got {min(weights)}; remove that data set instead")
    return Blend(tuple(values[1::2]), tuple(weights))


def _number(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None
