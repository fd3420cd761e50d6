"""A mapping that keeps the values that were used last, such as the plans for numbers of microbatches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(OrderedDict[K, V]):
    """Values by key; of more than ``most``, the one that was not used for the longest time is forgotten.

    ``get`` and an assignment use a value. Ranks that use the same keys in the same order forget the same ones.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def get(self, key: K, default: Any = None) -> Any:
        """The value of ``key``, which counts as used now."""
        if key in self:
            self.move_to_end(key)
        return super().get(key, default)

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)
