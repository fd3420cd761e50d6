"""Users' files and folders: whatever is wrong with them is one clear sentence."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from megatron.zero_bubble.errors import UserError

T = TypeVar("T")


def make_writable(folder: str | Path) -> None:
    """Make ``folder``, unless it is there, and write to it, so that nobody finds out later that it cannot be done.

    Raises:
        OSError: it cannot.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def read_file(path: str | Path, what: str, parse: Callable[[str], T]) -> T:
    """``parse`` of the file's text.

    Raises:
        UserError: ``what`` (for example ``"costs file"``), the path and the reason; that of ``parse`` is passed on.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read the {what} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{what} {path}: it must be JSON in UTF-8; this is not text") from None
    with naming(what, path):
        return parse(text)


@contextmanager
def naming(what: str, path: str | Path) -> Iterator[None]:
    """Whatever is wrong with the content of a file names the file."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"{what} {path}: {error}") from error


def json_object(text: str) -> dict[str, Any]:
    """The JSON object in ``text``; a ``UserError`` says where it stops being one."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"it must be JSON; line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise UserError("it must be JSON of a few levels; this nests too deeply to read") from None
    if isinstance(content, dict):
        return content
    raise UserError(f"it must be a JSON object; got {text.strip()[:40]!r}")


def read_key(content: dict[str, Any], key: str, form: str, fits: Callable[[Any], bool]) -> Any:
    """The value of ``key``; a ``UserError`` where it is missing or is not ``form``, in words, as ``fits`` tells."""
    if key not in content:
        raise UserError(f"it must have the key {key}, {form}; it is missing")
    if not fits(content[key]):
        raise UserError(f"{key} must be {form}; got {json.dumps(content[key])[:60]}")
    return content[key]
