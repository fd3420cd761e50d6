"""Sharded units in a plan's JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.zero_bubble.core.formats.files import is_positive, read_key
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.core.plan.shard import Sharding, check_chunks

SHARD_WEIGHTS = "shard_weights"
_UNIT, _WHOLE = "unit_microbatches", "whole_stages"


def sharding_content(sharding: Sharding) -> dict[str, Any]:
    """Return the keys of the plan's JSON."""
    return {SHARD_WEIGHTS: True, _UNIT: sharding.unit_microbatches, _WHOLE: sharding.open_chunks}


def sharding_from(content: Mapping[str, Any], placement: Placement) -> Sharding | None:
    """Read how chunks are sharded; None if the plan does not shard them.

    Raises:
        UserError: for keys of another form, or a placement with one stage per rank.
    """
    given = dict(content)
    if SHARD_WEIGHTS not in given or not read_key(given, SHARD_WEIGHTS, "true or false", lambda v: type(v) is bool):
        return None
    check_chunks(placement)
    unit, whole = (read_key(given, key, "a whole number above 0", is_positive) for key in (_UNIT, _WHOLE))
    return Sharding(unit, whole)
