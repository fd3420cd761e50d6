"""Vocabulary parallelism in the JSON of plans and traces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.files import is_true, read_key
from megatron.zero_bubble.core.ir import Flow, Schedule
from megatron.zero_bubble.core.ir.schedule import chain_of
from megatron.zero_bubble.core.ir.vocabulary import FLOWS, Algorithm, Divided, algorithm_of

_ALGORITHM = "vocabulary"
_AGAIN = "recompute_logits"


def algorithm_content(schedule: Schedule) -> dict[str, Any]:
    """Return the key of a schedule with passes of the vocabulary; nothing without them."""
    algorithm = algorithm_of(schedule)
    return {} if algorithm is None else {_ALGORITHM: algorithm}


def logits_content(divided: Divided | None) -> dict[str, Any]:
    """Return the key of a plan that computes its logits again; nothing for others."""
    return {_AGAIN: True} if divided is not None and divided.recompute_logits else {}


def divided_from(content: Mapping[str, Any]) -> Divided | None:
    """Read how the vocabulary is divided; None if it is not.

    Raises:
        UserError: for keys of another form, or logits of an undivided vocabulary.
    """
    algorithm, again = algorithm_from(content), is_true(content, _AGAIN)
    if again and algorithm is None:
        raise UserError(
            f"{_AGAIN} needs passes of a divided vocabulary and the key {_ALGORITHM}, which is missing; remove {_AGAIN}"
        )
    return None if algorithm is None else Divided(algorithm, again)


def flow_from(content: Mapping[str, Any]) -> Callable[[Schedule], Flow]:
    """Read what makes the flow of a schedule with or without passes of the vocabulary."""
    algorithm = algorithm_from(content)
    return chain_of if algorithm is None else FLOWS[algorithm]


def algorithm_from(content: Mapping[str, Any]) -> Algorithm | None:
    """Read the algorithm of vocabulary parallelism; None if the schedule is without it."""
    if _ALGORITHM not in content:
        return None
    form = "the algorithm of its vocabulary passes, 1 or 2"
    return cast(
        Algorithm, read_key(dict(content), _ALGORITHM, form, lambda value: type(value) is int and value in FLOWS)
    )
