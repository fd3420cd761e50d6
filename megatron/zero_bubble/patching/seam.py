"""One seam: an upstream name, what it must look like, and why it is replaced."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any


class SeamError(RuntimeError):
    """Upstream does not offer a seam as this package knows it."""


@dataclass(frozen=True)
class Seam:
    """A function of an upstream module.

    Attributes:
        module: where the name is looked up by its callers at each call.
        name: the function.
        parameters: names it must accept, in this order; it may have others between and after them.
        why: one line for ``report``.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    why: str

    def resolve(self) -> tuple[ModuleType, Callable[..., Any]]:
        """The module and its function, checked.

        Raises:
            SeamError: the name is missing, or its signature is not the known one.
        """
        module = importlib.import_module(self.module)
        function = getattr(module, self.name, None)
        if function is None:
            raise SeamError(
                f"{self.module} has no {self.name}, which zero-bubble training replaces; "
                "install a supported megatron-core (see README) or update this package"
            )
        found = list(inspect.signature(function).parameters)
        known = [name for name in found if name in self.parameters]
        if known != list(self.parameters):
            raise SeamError(
                f"{self.module}.{self.name} must accept {', '.join(self.parameters)} in this order; it has "
                f"({', '.join(found)}); install a supported megatron-core (see README) or update this package"
            )
        return module, function
