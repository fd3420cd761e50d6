"""One seam: an upstream name, what it must look like, and why it is replaced."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType


class SeamError(RuntimeError):
    """Upstream does not offer a seam as this package knows it."""


@dataclass(frozen=True)
class Seam:
    """A function of an upstream module, or of one of its classes.

    Attributes:
        module: where the name is looked up by its callers at each call.
        name: the function; ``Class.method`` for one that the class itself defines.
        parameters: names it must accept, in this order; it may have others between and after them.
        why: one line for ``report``.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    why: str

    @property
    def attribute(self) -> str:
        """The name in what holds it."""
        return self.name.rpartition(".")[2]

    def resolve(self) -> tuple[ModuleType | type, Callable]:
        """The module or the class that holds the function, and the function, checked.

        Raises:
            SeamError: the name is missing, or its signature is not the known one.
        """
        holder: ModuleType | type = self._import()
        if "." in self.name:
            holder = getattr(holder, self.name.partition(".")[0], type(None))
        function = getattr(holder, "__dict__", {}).get(self.attribute)
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
        return holder, function

    def _import(self) -> ModuleType:
        try:
            return importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{self.module}.".startswith(f"{error.name}."):
                raise  # something that the module itself needs
            raise SeamError(
                f"there is no {error.name}, whose {self.name} zero-bubble training replaces; run a script of a "
                "checkout of Megatron-LM, or put apply() into a training loop of your own"
            ) from error
