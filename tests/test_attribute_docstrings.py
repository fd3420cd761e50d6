"""A text below a name describes it; a text below anything else describes nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "megatron/zero_bubble"


def without_a_name(text: str) -> Iterator[str]:
    """The texts in the body of a module or class, after its docstring, that follow no assignment."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef)):
            for before, after in pairwise(node.body):
                if _is_text(after) and not isinstance(before, (ast.Assign, ast.AnnAssign)):
                    yield ast.unparse(after)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def test_every_text_describes_a_name() -> None:
    found = {str(path): [*without_a_name(path.read_text(encoding="utf-8"))] for path in PACKAGE.rglob("*.py")}
    assert {path: texts for path, texts in found.items() if texts} == {}


def test_a_text_that_lost_its_name_is_found() -> None:
    assert [*without_a_name('"""Doc."""\nimport os\n"""Lost."""\nA = 1\n"""Of A."""\n')] == ["'Lost.'"]
