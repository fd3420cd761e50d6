"""A digest of the body of a function: the same however it is formatted and commented, and on every version of Python.

Needs the standard library only.
"""

from __future__ import annotations

import ast
import hashlib
import re
from typing import Any

_LENGTH = 16
# Types and comments on them; whether a name is read or written and how a string is quoted follows from the rest.
_LEFT_OUT = frozenset({"annotation", "returns", "type_comment", "type_params", "ctx", "kind"})
# What belongs to a definition that is indented by {0}: lines indented further, closing brackets, comments, empty lines.
_REST = r".*\n(?:(?:{0}[ \t)\]}}#].*|[ \t]*)\n)*"


def digest_of(source: str, name: str) -> str | None:
    """The digest of the function or method (``Class.method``) that a module's source defines; None where it does not.
    Definitions that share a name, a property's for example, have one digest together.

    Raises:
        SyntaxError: of the source.
    """
    holder, _, function = name.rpartition(".")
    indent = " " * 4 if holder else ""
    if holder:
        source = "".join(_blocks(source, "", rf"class {holder}\b"))
    # Only what is asked for is parsed: the modules have thousands of lines.
    blocks = _blocks(source, indent, rf"(?:@.*\n{indent})*(?:async )?def {function}\b")
    if not blocks:
        return None
    tree = ast.parse(f"class _:\n{''.join(blocks)}" if holder else "".join(blocks))
    return hashlib.sha256(_spelled(tree).encode()).hexdigest()[:_LENGTH]


def _blocks(source: str, indent: str, head: str) -> list[str]:
    return re.findall(f"^{indent}{head}{_REST.format(indent)}", f"{source}\n", re.MULTILINE)


def _spelled(part: Any) -> str:
    """As ``ast.dump`` spells it, but without what the versions of Python disagree on, and without docstrings."""
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
    """The parts of an f-string, the text between two values as one string: Python 3.12 cuts it up, down to nothing."""
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
    """Whether it is a statement of a constant only: a docstring, or a comment in quotes."""
    return isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant)
