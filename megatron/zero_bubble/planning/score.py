"""The best of several plans, and why others dropped out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import lt
from typing import Generic, NamedTuple, TypeVar

from megatron.zero_bubble.core.errors import Remedy, UserError

T = TypeVar("T")
Score = tuple[float, ...]
"""How good a plan is, the least is the best: memory above the limit (``excess``), length in ms, then tie-breakers."""


class DroppedVariant(NamedTuple):
    """A variant without a plan, and the reason as a sentence.

    Attributes:
        remedy: flags of a job with which it would have a plan, if known.
    """

    name: str
    reason: str
    remedy: Remedy | None = None

    def __str__(self) -> str:
        return f"{self.name} dropped out: {self.reason}"


@dataclass(frozen=True)
class Best(Generic[T]):
    """The best offer; ``dropped`` are the variants that had none."""

    offer: T
    dropped: tuple[DroppedVariant, ...] = ()

    @property
    def all(self) -> Iterator[T | DroppedVariant]:
        """What dropped out, and the best offer."""
        yield from self.dropped
        yield self.offer


def attempt(name: str, make: Callable[[], Iterable[T]]) -> Iterator[T | DroppedVariant]:
    """Yield what ``make`` offers for one of several variants, and then the reason if it refuses."""
    try:
        yield from make()
    except UserError as error:
        yield DroppedVariant(name, str(error), error.remedy)


def best(
    offers: Iterable[T | DroppedVariant],
    score: Callable[[T], Score],
    less: Callable[[Score, Score], bool] = lt,
    reason: int = 0,
) -> Best[T]:
    """Take the offer with the least score; of equals, the first.

    Args:
        less: whether a score is below another one; ``is_less`` to prefer the first where figures differ by rounding.
        reason: the number of the variant whose reason is given if all dropped out.

    Raises:
        UserError: when all variants dropped out.
    """
    offered: list[T] = []
    dropped: list[DroppedVariant] = []
    least: Score | None = None
    for each in offers:
        if isinstance(each, DroppedVariant):
            dropped.append(each)
        elif not offered:
            offered = [each]
        else:
            least = score(offered[0]) if least is None else least
            if less(value := score(each), least):
                offered, least = [each], value
    if not offered:
        raise UserError(dropped[reason].reason)
    return Best(offered[0], tuple(dropped))
