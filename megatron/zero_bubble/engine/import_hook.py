"""Runs code around the execution of selected modules when they are imported."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class ImportHook(MetaPathFinder):
    """A meta-path finder that delegates to the other finders and wraps the execution of the modules they find.

    Args:
        watches: whether to watch the module of a full name.
        around: makes the context in which the code of a watched module runs, unless the hook has been removed.
    """

    def __init__(
        self, watches: Callable[[str], bool], around: Callable[[ModuleType], AbstractContextManager[None]]
    ) -> None:
        self._watches = watches
        self._around = around
        self._searching: set[str] = set()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in self._searching or not self._watches(name):
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
            # Remove the instance attribute that is set below; another hook that watches the module may have done so.
            vars(loader).pop("exec_module", None)
            if self in sys.meta_path:
                with self._around(module):
                    execute(module)
            else:
                execute(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]


class PostImportHook(ImportHook):
    """Calls a function right after the code of a module has run, before the importing code continues.

    Args:
        names: full names of the modules to watch.
        then: called with each of these modules after its code has run.
    """

    def __init__(self, names: Collection[str], then: Callable[[ModuleType], None]) -> None:
        @contextmanager
        def around(module: ModuleType) -> Iterator[None]:
            yield
            if self in sys.meta_path:
                then(module)

        super().__init__(frozenset(names).__contains__, around)


class AfterImport(ImportHook):
    """Calls a function once, when no module of some package is being imported any more and a certain one is complete.

    Modules of one package import each other in circles. What needs many of them therefore waits for the end of the
    outermost import.

    Args:
        prefix: what the full names of these modules begin with.
        needed: the full name of the module that must be complete.
        then: called without arguments, after this hook has been removed.
    """

    def __init__(self, prefix: str, needed: str, then: Callable[[], None]) -> None:
        self._depth = 0

        @contextmanager
        def around(module: ModuleType) -> Iterator[None]:
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
            if self._depth == 0 and needed in sys.modules and self in sys.meta_path:
                sys.meta_path.remove(self)
                package, _, name = module.__name__.rpartition(".")
                setattr(sys.modules[package], name, module)  # as the import itself does next
                then()

        super().__init__(lambda name: name.startswith(prefix), around)
