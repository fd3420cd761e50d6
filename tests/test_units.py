"""Every figure of costs and plans has a unit, in its name or in its docstring."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "megatron/zero_bubble"
UNIT = re.compile(
    r"\b(ms|milliseconds|seconds|bytes|microbatch(es)?|shares?|factor|unit|operations|[TG]B/s)\b", re.IGNORECASE
)
OF_ALL = re.compile(r"\b(in (the |one |any )?(ms|bytes|unit)|milliseconds|bytes)\b", re.IGNORECASE)
IN_NAME = re.compile(r"_(ms|s|bytes|bytes_per_ms|share|microbatches|rate)$")


def without_unit(text: str) -> list[str]:
    """The float fields of the public classes in a module whose unit is neither in their name, nor in the docstring."""
    return [
        f"{node.name}.{name}"
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        for name in float_fields(node)
        if not (IN_NAME.search(name) or is_described(name, ast.get_docstring(node) or ""))
    ]


def float_fields(node: ast.ClassDef) -> Iterator[str]:
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and re.search(r"\bfloat\b", ast.unparse(field.annotation)):
            yield ast.unparse(field.target)


def is_described(name: str, docstring: str) -> bool:
    about, _, listed = docstring.partition("Attributes:")
    entry = re.search(rf"^    (?:\w+, )*{name}(?:, \w+)*: (.*(?:\n {{8}}.*)*)", listed, re.MULTILINE)
    return bool(OF_ALL.search(about) or UNIT.search(entry[1] if entry else about))


@pytest.mark.parametrize("room", ["core/costs", "planning"])
def test_every_figure_has_a_unit(room: str) -> None:
    found = {path.name: without_unit(path.read_text(encoding="utf-8")) for path in (PACKAGE / room).glob("*.py")}
    assert {name: fields for name, fields in found.items() if fields} == {}


def test_a_figure_without_a_unit_is_found() -> None:
    text = (
        'class A:\n    """What a stage takes.\n\n    Attributes:\n        a, b: what F saves{}.\n    """\n\n'
        "    a: float\n    b: tuple[float, ...]\n    c_ms: float\n    d: int\n"
    )
    assert without_unit(text.format("")) == ["A.a", "A.b"]
    assert without_unit(text.format(", in bytes")) == []
