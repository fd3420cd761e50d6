"""Data iterators whose items a job gets more than once: they stand before the job's own, which they read by ``next``.

What another method of the job's iterator returns could not be returned again, so such a method is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from copy import copy
from functools import partial
from typing import Any, ClassVar, NoReturn

from megatron.zero_bubble.core.errors import UserError


def copied(item: Any) -> Any:
    """A copy of an item that will be used again, with the same tensors.

    Consumers may replace the entries of dicts and lists: Megatron-LM slices batches in place.
    """
    return copy(item) if isinstance(item, (dict, list)) else item


class Reread(Iterator[Any]):
    """A data iterator in front of ``source``, which has the same attributes.

    Methods of the source, and iterators in its attributes, also in lists, tuples and dicts, raise UserError when they
    are used. Methods of other objects in its attributes cannot be distinguished from harmless ones: a forward step must
    not read by them.

    Attributes:
        what: the feature that needs items more than once.
        why: when it needs them.
        otherwise: how to train without it.

    Raises:
        UserError: the source is not an iterator.
    """

    what: ClassVar[str]
    why: ClassVar[str]
    otherwise: ClassVar[str]

    def __init__(self, source: Any) -> None:
        self.check(source)
        self._source = source

    @classmethod
    def check(cls, source: Any) -> None:
        """Raise UserError unless ``source`` is an iterator, or None on a rank that reads no data."""
        if source is not None and not _is_iterator(source):
            name = type(source).__name__
            raise UserError(
                f"{cls._rule()}; got a {name}, which has no __next__; give the class __next__, read it with "
                f"next(data_iterator) in the forward step, or {cls.otherwise}"
            )

    @classmethod
    def _rule(cls) -> str:
        return f"with {cls.what}, a forward step must read its data with next(data_iterator), because {cls.why}"

    def __len__(self) -> int:
        return len(self._source)

    def __bool__(self) -> bool:
        return bool(self._source)

    def __getattr__(self, name: str) -> Any:
        if name == "_source":  # a copy that is not initialized yet
            raise AttributeError(name)
        found = getattr(self._source, name)
        if inspect.isroutine(found) or isinstance(found, partial) or _has_iterators(found):
            used = f"{type(self._source).__name__}.{name}"
            return _Refused(f"{self._rule()}; got a use of {used}; use next(data_iterator), or {self.otherwise}")
        return found


def _is_iterator(found: Any) -> bool:
    return hasattr(type(found), "__next__")


def _has_iterators(found: Any) -> bool:
    parts = found.values() if isinstance(found, dict) else found if isinstance(found, (list, tuple)) else ()
    return _is_iterator(found) or any(map(_is_iterator, parts))


class _Refused(Iterator[Any]):
    """In place of a method or iterator that would read past a ``Reread``."""

    def __init__(self, sentence: str) -> None:
        self._sentence = sentence

    def __call__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise UserError(self._sentence)

    def __next__(self) -> NoReturn:
        raise UserError(self._sentence)

    def __getitem__(self, _key: Any) -> NoReturn:
        raise UserError(self._sentence)
