"""The table of layers, from .importlinter and the docstrings of the packages."""

from __future__ import annotations

import ast
import configparser
import re
from pathlib import Path

from site_parts.markdown import code, table

_ROOT = Path(__file__).parent.parent.parent
_PACKAGE = _ROOT / "megatron/zero_bubble"


def layers() -> str:
    """Top down: every package, what it needs, and the first sentence of its docstring."""
    config = configparser.ConfigParser()
    config.read(_ROOT / ".importlinter")
    pure = {name.rpartition(".")[2] for name in config["importlinter:contract:pure"]["source_modules"].split()}
    rows = []
    lines = config["importlinter:contract:layers"]["layers"].split("\n")
    for number, line in enumerate(filter(None, lines), 1):
        for name in re.split(r"[ :|]+", line):
            folder = (_PACKAGE / name).is_dir()
            needs = "standard library only" if name in pure else ""
            rows.append((str(number), code(name + ("/" if folder else ".py")), _summary(name), needs))
    return table(("layer", "package", "what it holds", "needs"), rows)


def _summary(name: str) -> str:
    """The first paragraph of the docstring."""
    path = next(p for p in (_PACKAGE / name / "__init__.py", _PACKAGE / f"{name}.py") if p.exists())
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.sub(r":\w+:`", "`", docstring.partition("\n\n")[0].replace("``", "`"))


PARTS = {"layers": layers}
