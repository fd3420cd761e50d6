"""The table of layers, from .importlinter and the docstrings of the packages."""

from __future__ import annotations

import ast
import configparser
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from site_parts.markdown import code, table

_ROOT = Path(__file__).parent.parent.parent
_PACKAGE = _ROOT / "megatron/zero_bubble"
_NAME = "megatron.zero_bubble"


def layers() -> str:
    """Top down, each wing followed by its rooms: what it needs, and the first sentence of its docstring."""
    config = configparser.ConfigParser()
    config.read(_ROOT / ".importlinter")
    pure = config["importlinter:contract:pure"]["source_modules"].split()
    contracts = [section for section in config.values() if section.get("type") == "layers"]
    floors = {contract["containers"].strip(): contract["layers"].strip().split("\n") for contract in contracts}
    rows = [
        (floor, code(_path(module)), _summary(module), "standard library only" if _wing(module) in pure else "")
        for floor, module in _modules(floors, _NAME)
    ]
    return table(("floor", "package", "what it holds", "needs"), rows)


def _modules(floors: Mapping[str, list[str]], container: str, above: str = "") -> Iterator[tuple[str, str]]:
    """Yield the floor of each module of a container and its dotted name, and those of the modules in it."""
    for number, line in enumerate(floors.get(container, ()), 1):
        for name in re.split(r"[ :|]+", line):
            yield f"{above}{number}", f"{container}.{name}"
            yield from _modules(floors, f"{container}.{name}", f"{above}{number}.")


def _wing(module: str) -> str:
    return ".".join(module.split(".")[:3])


def _path(module: str) -> str:
    path = module.removeprefix(f"{_NAME}.").replace(".", "/")
    return path + ("/" if (_PACKAGE / path).is_dir() else ".py")


def _summary(module: str) -> str:
    """The first paragraph of the docstring."""
    path = _PACKAGE / _path(module)
    path = path / "__init__.py" if path.is_dir() else path
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.sub(r":\w+:`", "`", docstring.partition("\n\n")[0].replace("``", "`"))


PARTS = {"layers": layers}
