"""Matrices of which only some rows run by default; ``scripts/test.sh --full`` runs all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some(rows: Iterable[Any], *default: Any) -> list[Any]:
    """Return ``rows`` for ``pytest.mark.parametrize``, all but those of ``default`` marked ``full``.

    A row is the value of one parameter, or a tuple of the values of several.
    """
    given = list(rows)
    assert all(row in given for row in default), "a row that runs by default must be a row"
    return [
        pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=() if row in default else pytest.mark.full)
        for row in given
    ]
