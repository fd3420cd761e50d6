"""The models of one process that run under one pipeline in turn, such as a policy and its reference."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any


@dataclass
class _Known:
    """A model, by its configuration, which all its chunks share."""

    config: weakref.ref[Any]
    number: int
    is_checked: bool = False


class Models:
    """Which models have run, in the order of their first iterations, and whether their options were checked."""

    def __init__(self) -> None:
        self._known: list[_Known] = []
        self._count = 0

    def number(self, config: Any) -> int:
        """The number of a model, counted from 0; the same on all ranks of the pipeline."""
        return self._find(config).number

    def is_unchecked(self, config: Any) -> bool:
        """Whether the options of a model have not been checked for the plan in use."""
        return not self._find(config).is_checked

    def mark_checked(self, config: Any) -> None:
        """Called when the options of a model are found to be supported."""
        self._find(config).is_checked = True

    def forget_checks(self) -> None:
        """Called when there is a new plan, under which other options may be supported."""
        for each in self._known:
            each.is_checked = False

    def _find(self, config: Any) -> _Known:
        # Configurations have no hash, and equal ones may belong to different models.
        self._known = [each for each in self._known if each.config() is not None]
        for each in self._known:
            if each.config() is config:
                return each
        self._known.append(_Known(weakref.ref(config), self._count))
        self._count += 1
        return self._known[-1]
