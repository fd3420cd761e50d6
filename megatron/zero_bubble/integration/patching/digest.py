"""Digest of a function's body that does not depend on formatting, comments and the version of Python.

Needs the standard library only.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from typing import Any

_LENGTH = 16
# Types and type comments; whether a name is read or written, and how a string is quoted, follow from other fields.
_LEFT_OUT = frozenset({"annotation", "returns", "type_comment", "type_params", "ctx", "kind"})
# The lines of a definition indented by {0}: lines indented further, closing brackets, comments, and empty lines.
_REST = r".*\n(?:(?:{0}[ \t)\]}}#].*|[ \t]*)\n)*"


@functools.lru_cache(maxsize=256)
def digest_of(source: str, name: str) -> str | None:
    """Digest of the function or method (``Class.method``) in a module's source; None if the source does not define it.

    Definitions that share a name, such as the getter and the setter of a property, share one digest. It is cached,
    because a process that applies a schedule again asks for the same ones.

    Raises:
        SyntaxError: the source cannot be parsed.
    """
    holder, _, function = name.rpartition(".")
    indent = " " * 4 if holder else ""
    if holder:
        source = "".join(_blocks(source, "", rf"class {holder}\b"))
    # Only the definition is parsed, because the modules have thousands of lines.
    blocks = _blocks(source, indent, rf"(?:@.*\n{indent})*(?:async )?def {function}\b")
    if not blocks:
        return None
    tree = ast.parse(f"class _:\n{''.join(blocks)}" if holder else "".join(blocks))
    return hashlib.sha256(_spelled(tree).encode()).hexdigest()[:_LENGTH]


def _blocks(source: str, indent: str, head: str) -> list[str]:
    return re.findall(f"^{indent}{head}{_REST.format(indent)}", f"{source}\n", re.MULTILINE)


def _spelled(part: Any) -> str:
    """A text like that of ``ast.dump``, without the fields that differ by version of Python and without docstrings."""
    if isinstance(part, list):
        return f"[{','.join([_spelled(item) for item in part if not _says_nothing(item)])}]"
    if isinstance(part, ast.JoinedStr):
        return f"f{_spelled(_merged(part.values))}"
    if not isinstance(part, ast.AST):
        return ascii(part)
    spelled = [type(part).__name__]
    for field in part._fields:
        value = getattr(part, field, None)
        if value is not None and value != [] and field not in _LEFT_OUT:
            spelled.append(f"{field}={_spelled(value)}")
    return f"({' '.join(spelled)})"


def _merged(values: list[ast.expr]) -> list[ast.expr | str]:
    """The parts of an f-string, with adjacent texts joined: Python 3.12 splits them and adds empty ones."""
    merged: list[ast.expr | str] = []
    for value in values:
        if not isinstance(value, ast.Constant):
            merged.append(value)
        elif merged and isinstance(merged[-1], str):
            merged[-1] += str(value.value)
        elif value.value:
            merged.append(str(value.value))
    return merged


def _says_nothing(item: Any) -> bool:
    """Whether the statement is only a constant: a docstring, or a comment in quotes."""
    return isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant)
