"""What a job would gain without the options that refuse most of its changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import NamedTuple

from megatron.zero_bubble.core.errors import Remedy
from megatron.zero_bubble.planning.worth import Advice

_MOST = 4
"""Options in a row that are looked behind."""


class Remedied(NamedTuple):
    """What stands in the way of most changes.

    Attributes:
        reason: why they are refused, the first of the reasons if behind it there are more.
        refused: the number of changes that it refuses.
        remedy: the flags with which it does not.
        advice: on these changes, for the job with the remedy.
    """

    reason: str
    refused: int
    remedy: Remedy
    advice: Advice


def remedied(found: Advice, ask: Callable[[Remedy, Collection[str]], Advice]) -> Remedied | None:
    """Look behind the reason that refuses most of the changes for which a remedy is known; None if there is none.

    Args:
        ask: returns the advice for a job with a remedy, on changes that are given by their names.
    """
    behind: Remedied | None = None
    for _ in range(_MOST):
        reasons = Counter((each.reason, each.remedy) for each in found.dropped if each.remedy is not None)
        if not reasons:
            break
        ((reason, more), number) = reasons.most_common(1)[0]
        remedy = more
        if behind is not None:
            own = behind.remedy
            remedy = Remedy((*own.adds, *more.adds), (*own.drops, *more.drops), own.is_counted and more.is_counted)
        found = ask(remedy, {each.name for each in found.dropped if each.reason == reason})
        first = (reason, number) if behind is None else behind[:2]
        behind = Remedied(*first, remedy, found)
        if found.best is not None:
            break
    return behind
