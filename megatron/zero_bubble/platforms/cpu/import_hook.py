"""Runs a callback on selected modules right after their code has run, before the importing code continues."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Collection, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class PostImportHook(MetaPathFinder):
    """A meta-path finder that delegates to the other finders and wraps the execution of the modules they find.

    Args:
        names: full names of the modules to watch.
        then: called with each of these modules after its code has run.
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
            del loader.exec_module  # removes the instance attribute that is set below
            execute(module)
            if self in sys.meta_path:
                self._then(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
