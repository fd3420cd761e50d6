"""Upstream names and their expected signatures: ``Seam`` for a name that is replaced, ``Used`` for one that is used."""

from __future__ import annotations

import dis
import functools
import importlib
import inspect
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from megatron.zero_bubble.core.errors import SeamError


@dataclass(frozen=True)
class Seam:
    """A function of an upstream module, or of one of its classes, that is replaced.

    Attributes:
        module: the module in which callers look up the name at each call.
        name: the function; ``Class.method`` for a method that the class itself defines.
        parameters: names that it must accept, in this order; it may have others between and after them. Empty
            where they are not checked.
        why: what the replacement does, one line for ``report``.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    why: str

    @property
    def attribute(self) -> str:
        """The name without its class."""
        return self.name.rpartition(".")[2]

    def exists(self) -> bool:
        try:
            found: Any = importlib.import_module(self.module)
        except ModuleNotFoundError:
            return False
        return all((found := getattr(found, part, None)) is not None for part in self.name.split("."))

    def is_loaded(self) -> bool:
        """Whether the module has been imported as far as the function."""
        return hasattr(sys.modules.get(self.module), self.name)

    def importers(self) -> tuple[Seam, ...]:
        """The seam in each loaded module that has the function under its name, after that in its own module.

        A module that imports it later gets the replacement.
        """
        _, function = self.resolve()
        holders = (name for name, module in list(sys.modules.items()) if _has(module, self.name, function))
        return self, *(replace(self, module=name) for name in sorted(holders) if name != self.module)

    def resolve(self) -> tuple[ModuleType | type, Callable]:
        """Look up the function and check its signature; return the module or class that holds it, and the function.

        Raises:
            SeamError: the name is missing, or its signature is not the expected one.
        """
        holder: ModuleType | type = _imported(self.module, self.name, "replaces")
        if "." in self.name:
            holder = getattr(holder, self.name.partition(".")[0], type(None))
        function = getattr(holder, "__dict__", {}).get(self.attribute)
        if function is None:
            raise _missing(self.module, self.name, "replaces")
        if self.parameters:
            _check_parameters(f"{self.module}.{self.name}", function, self.parameters)
        return holder, function


@dataclass(frozen=True)
class Used:
    """An upstream name that is used but not replaced.

    Attributes:
        module: the module that we import it from.
        name: the name of anything in the module; ``Class.attribute`` for a method, a field or an attribute that
            ``__init__`` assigns, of the class or of its bases.
        parameters: for a function, as in ``Seam``.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()

    def check(self) -> None:
        """Check that the name exists, and its signature if it has one.

        Raises:
            SeamError: the name is missing, or its signature is not the expected one.
        """
        found: Any = _imported(self.module, self.name, "uses")
        for part in self.name.split("."):
            holder = found
            found = getattr(holder, part, None)
            if not hasattr(holder, part) and not (isinstance(holder, type) and _has_instances_with(part, holder)):
                raise _missing(self.module, self.name, "uses")
        if self.parameters:
            _check_parameters(f"{self.module}.{self.name}", found, self.parameters)


def _has_instances_with(attribute: str, holder: type) -> bool:
    """Whether ``attribute`` is a dataclass field, or is assigned to ``self`` in ``__init__`` or ``__post_init__``."""
    if attribute in getattr(holder, "__dataclass_fields__", ()):
        return True
    makers = (vars(base).get(name) for base in holder.__mro__ for name in ("__init__", "__post_init__"))
    return any(attribute in _assigned(maker) for maker in makers if inspect.isfunction(maker))


@functools.cache
def _assigned(method: Callable[..., Any]) -> frozenset[str]:
    steps = itertools.pairwise(dis.get_instructions(inspect.unwrap(method)))
    pairs = ((before.argval, step.argval) for before, step in steps if step.opname == "STORE_ATTR")
    # From Python 3.13 on, one instruction may load both the value and ``self``.
    return frozenset(name for loaded, name in pairs if (loaded[-1] if isinstance(loaded, tuple) else loaded) == "self")


def _has(module: ModuleType, name: str, function: Callable[..., Any]) -> bool:
    """Whether a module has a function, or a replacement that an earlier ``apply`` has left in it."""
    found = getattr(module, "__dict__", {}).get(name)  # without the hooks of modules that import on demand
    return callable(found) and inspect.unwrap(found) is inspect.unwrap(function)


def _missing(module: str, name: str, verb: str) -> SeamError:
    return SeamError(
        f"{module} has no {name}, which zero-bubble training {verb}; "
        "install a supported megatron-core (see README) or update this package"
    )


def _check_parameters(name: str, function: Callable[..., Any], parameters: tuple[str, ...]) -> None:
    found = list(inspect.signature(function).parameters)
    if [parameter for parameter in found if parameter in parameters] != list(parameters):
        raise SeamError(
            f"{name} must accept {', '.join(parameters)} in this order; it has "
            f"({', '.join(found)}); install a supported megatron-core (see README) or update this package"
        )


def _imported(module: str, name: str, verb: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # a module that this module imports is missing
        in_core = module.startswith("megatron.core")
        remedy = (
            "install a supported megatron-core (see README) or update this package"
            if in_core
            else "run a script from a Megatron-LM checkout, or call apply() in your own training loop"
        )
        raise SeamError(f"cannot import {error.name}, whose {name} zero-bubble training {verb}; {remedy}") from error
