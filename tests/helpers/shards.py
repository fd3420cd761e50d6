"""Reads weights that may be shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any


def read_each(units: Any, chunks: Sequence[Any], read: Callable[[Sequence[Any]], dict[str, str]]) -> dict[str, str]:
    """Merge what ``read`` returns for each chunk while its weights are whole; ``units`` are None without shards."""
    found: dict[str, str] = {}
    for index, chunk in enumerate(chunks):
        with nullcontext() if units is None else units.whole_weights(index):
            found |= read([chunk])
    return found
