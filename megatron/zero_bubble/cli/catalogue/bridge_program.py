"""Runs the recipe functions of a checkout of Megatron-Bridge, and prints what they set, one JSON object per line.

A program of its own, which an interpreter without packages runs: what a recipe imports from outside the recipes is a
stand-in that records what is set on it, so that neither torch nor megatron-core is needed.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

RECIPES = ("megatron.bridge.recipes", "megatron.bridge.perf_recipes")
_REAL = (*RECIPES, "megatron.bridge.training.mixed_precision")
"""Modules of which the code is run."""
_FOREIGN = ("megatron", "torch", "transformers", "transformer_engine", "nemo_run", "omegaconf", "yaml", "numpy")


class _Kind(type):
    """A stand-in for a class, of which every attribute is another one."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kind(name, (Recorder,), {})

    def __bool__(cls) -> bool:
        return True


class Recorder(metaclass=_Kind):
    """An object that records what is set on it; what was not set is an empty one."""

    def __init__(self, *_: Any, **fields: Any) -> None:
        vars(self).update(fields)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return vars(self).setdefault(name, Recorder())

    def __call__(self, *_: Any, **fields: Any) -> Any:
        return Recorder(**fields)

    def __bool__(self) -> bool:
        return bool(vars(self))

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __gt__(self, other: Any) -> bool:
        return False

    __lt__ = __ge__ = __le__ = __gt__


class Bridge:
    """The stand-in for ``AutoBridge``, whose models are known by their names."""

    sizes: ClassVar[dict[str, dict[str, Any]]] = {}

    def __init__(self, name: Any) -> None:
        self.name = name if isinstance(name, str) else ""

    @classmethod
    def from_hf_pretrained(cls, name: Any, **_: Any) -> Bridge:
        return cls(name)

    def to_megatron_provider(self, **_: Any) -> Recorder:
        return Recorder(model_name=self.name, **self.sizes.get(self.name, {}))

    get_model_config = to_megatron_provider


class _Stand(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []
        if module.__name__ == "megatron.bridge":
            module.AutoBridge = Bridge  # type: ignore[attr-defined]
        module.__getattr__ = _attribute  # type: ignore[method-assign]


def _attribute(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Bridge if name == "AutoBridge" else _Kind(name, (Recorder,), {})


class _Finder(MetaPathFinder):
    """Finds recipes in the checkout, and stand-ins for all that is foreign."""

    def __init__(self, source: Path) -> None:
        self.source = source

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if any(f"{name}.".startswith(f"{real}.") for real in _REAL):
            return PathFinder.find_spec(name, [str(self.source.joinpath(*name.split(".")[:-1]))])
        return ModuleSpec(name, _Stand(), is_package=True) if name.partition(".")[0] in _FOREIGN else None


def plain(value: Any) -> Any:
    """A value as JSON has it; None for what is no plain value."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, _Kind):
        return value.__name__
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value if isinstance(value, (bool, int, float, str)) else None


def main(checkout: str) -> None:
    """Print every recipe: its file, its name, what it sets, and why it failed, if it did."""
    source, out = Path(checkout) / "src", sys.stdout
    sys.stdout = sys.stderr  # what recipes print
    Bridge.sizes = json.load(sys.stdin)
    sys.meta_path.insert(0, _Finder(source))
    for file in sorted(file for name in RECIPES for file in source.joinpath(*name.split(".")).rglob("*.py")):
        module_name = ".".join(file.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        where = str(file.relative_to(checkout))
        try:
            found = vars(importlib.import_module(module_name))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any failure of others' code is a row of the catalogue
            print(json.dumps({"file": where, "name": "", "problem": f"{type(error).__name__}: {error}"}), file=out)
            continue
        for name, function in found.items():
            is_own = inspect.isfunction(function) and function.__module__ == module_name
            if is_own and name.endswith("_config") and not name.startswith("_"):
                print(json.dumps({"file": where, "name": name, **_recorded(function)}), file=out)


def _recorded(function: Any) -> dict[str, Any]:
    """What a recipe sets, by the part of its configuration, or why it failed."""
    try:
        fields = vars(function())
    except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
        return {"problem": f"{type(error).__name__}: {error}"}
    parts = {name: part for name, part in fields.items() if hasattr(part, "__dict__")}
    named = {name: plain(part) for name, part in fields.items() if isinstance(part, str)}
    return {"parts": {n: {k: plain(v) for k, v in vars(part).items()} for n, part in parts.items()}, "named": named}


if __name__ == "__main__":
    main(sys.argv[1])
