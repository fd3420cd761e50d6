"""Runs a callback on chosen modules right after they are imported, before their importer sees them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Collection, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class PostImportHook(MetaPathFinder):
    """A finder that finds nothing itself: it lets the others find ``names`` and then watches the module execute.

    Args:
        names: full module names to watch.
        then: called with each of these modules once its own code has run.
    """

    def __init__(self, names: Collection[str], then: Callable[[ModuleType], None]) -> None:
        self._names = frozenset(names)
        self._then = then
        self._searching: set[str] = set()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._names or name in self._searching:
            return None
        self._searching.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching.discard(name)
        if spec is not None and spec.loader is not None:
            self._watch(spec)
        return spec

    def _watch(self, spec: ModuleSpec) -> None:
        loader = spec.loader
        assert loader is not None
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the instance attribute set below: nothing stays
            execute(module)
            if self in sys.meta_path:
                self._then(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
