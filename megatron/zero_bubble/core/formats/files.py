"""Read the user's files and check folders; every error is one sentence that names the file."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from megatron.zero_bubble.core.errors import UserError

T = TypeVar("T")
_MOST_DIGITS = 600


def make_writable(folder: str | Path) -> None:
    """Create ``folder`` if it is missing, and check that it is writable, so that the run does not fail later.

    Raises:
        OSError: when the folder cannot be created or written to.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def read_file(path: str | Path, what: str, parse: Callable[[str], T]) -> T:
    """Read a file and ``parse`` its text.

    Raises:
        UserError: when the file cannot be read or parsed; the message has ``what`` (for example ``"costs file"``), the
            path and the reason.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read the {what} {path}: {error.strerror}; check the path") from None
    except UnicodeDecodeError:
        raise UserError(
            f"{what} {path}: it must be JSON in UTF-8; the file is not UTF-8 text; save it as UTF-8"
        ) from None
    with naming(what, path):
        return parse(text)


@contextmanager
def naming(what: str, path: str | Path) -> Iterator[None]:
    """Context in which an error about the content of a file also names the file."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"{what} {path}: {error}") from error


def json_object(text: str) -> dict[str, Any]:
    """Parse the JSON object in ``text``; a ``UserError`` gives the position of a syntax error."""
    try:
        content = json.loads(text, parse_int=_integer, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        raise UserError(
            f"it must be JSON; line {error.lineno}, column {error.colno}: {error.msg}; fix it there"
        ) from None
    except RecursionError:
        raise UserError("it must be JSON of a few levels; it is nested too deeply to read") from None
    if isinstance(content, dict):
        return content
    raise UserError(f"it must be a JSON object; got {text.strip()[:40]!r}")


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise UserError(
            f"a number has at most {_MOST_DIGITS} digits; got {digits[:20]}... of {len(digits)}; shorten it"
        )
    return int(digits)


def _without_duplicates(items: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(items)
    if len(content) < len(items):
        keys = [key for key, _ in items]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise UserError(
            f"every key occurs once in its object; got {twice!r} {keys.count(twice)} times; remove all but one"
        )
    return content


def read_key(content: Mapping[str, Any], key: str, form: str, fits: Callable[[Any], bool]) -> Any:
    """Return the value of ``key``.

    Raises:
        UserError: when the key is missing or ``fits`` rejects its value; the message requires ``form``, in words.
    """
    if key not in content:
        raise UserError(f"it must have the key {key}, {form}; it is missing")
    if not fits(content[key]):
        raise UserError(f"{key} must be {form}; got {json.dumps(content[key])[:60]}")
    return content[key]


def read_optional(content: Mapping[str, Any], key: str, form: str, fits: Callable[[Any], bool]) -> Any:
    """Return the value of ``key`` as ``read_key``; None if it is missing."""
    return read_key(content, key, form, fits) if key in content else None


def is_true(content: Mapping[str, Any], key: str) -> bool:
    """Whether a key is there and true.

    Raises:
        UserError: when it is no boolean.
    """
    return bool(read_optional(content, key, "true or false", lambda value: type(value) is bool))


def list_of(fits: Callable[[Any], bool]) -> Callable[[object], bool]:
    """Whether a value of JSON is a list of values that fit."""
    return lambda value: isinstance(value, list) and all(map(fits, value))


def is_text(value: object) -> bool:
    """Whether a value of JSON is a string."""
    return isinstance(value, str)


def is_positive(value: object) -> bool:
    """Whether a value of JSON is a whole number above 0."""
    return type(value) is int and value > 0
