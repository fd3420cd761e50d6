"""Passes: the units of compute that a schedule orders."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from enum import Enum
from typing import NamedTuple, TypeVar

from megatron.zero_bubble.core.errors import UserError

_Resource = TypeVar("_Resource")


class Kind(Enum):
    """What a pass computes.

    Where a backward needs activations that F did not keep, a pass of its own (R) may compute them again before it. With
    vocabulary parallelism (``ir.vocabulary``), every rank also runs passes of its shards of the output layer (S and T)
    and of the embedding (I and J), and the rank of the last stage computes the loss in a pass of its own (L).
    """

    F = "F"
    B = "B"
    W = "W"
    BW = "BW"
    S = "S"
    T = "T"
    L = "L"
    I = "I"  # noqa: E741
    J = "J"
    R = "R"

    # Members are singletons, so identity hashing is correct; Enum's default hashes the name in Python at every look-up.
    __hash__ = object.__hash__

    def __str__(self) -> str:
        return self.value


# Enum finds a member in Python at every look-up of ``Kind.F``; code that runs for every pass imports these names.
F, B, W, BW, S, T, L, I, J, R = Kind  # noqa: E741

_TEXT = {kind: kind.value for kind in Kind}

FORWARDS = (F, I, S, L)
"""The kinds that an evaluation runs."""
REPEATABLE = (F, I, S)
"""The kinds that an iteration may run before it validates the previous optimizer step, and can repeat if that is
rejected: forwards that read nothing that a validation changes. L reads the loss scale."""
VOCABULARY_KINDS = (S, T, L, I, J)
"""The kinds of vocabulary parallelism. The stage of S, T, I and J is the first stage of their rank."""

_PASS = re.compile(r"([0-9]{1,9})(F|BW|B|W|R|S|T|L|I|J)([0-9]{1,9})(?:\.([0-9]{1,9}))?")


class Pass(NamedTuple):
    """One unit of compute: ``kind`` of ``microbatch`` (and sequence ``slice``) on ``stage``.

    It is a tuple, because plans hash and compare hundreds of thousands of passes.
    """

    stage: int
    kind: Kind
    microbatch: int
    slice: int = 0

    def __str__(self) -> str:
        stage, kind, microbatch, slice_ = self  # for hundreds of thousands of passes
        text = f"{stage}{_TEXT[kind]}{microbatch}"
        return f"{text}.{slice_}" if slice_ else text

    @property
    def label(self) -> str:
        """The microbatch and, if it is not the first, the slice."""
        return f"{self.microbatch}.{self.slice}" if self.slice else str(self.microbatch)

    @classmethod
    def parse(cls, text: str) -> Pass:
        """Read what ``str`` wrote.

        Raises:
            UserError: when ``text`` does not have this form; the message shows the grammar.
        """
        match = _PASS.fullmatch(text)
        if match is None:
            raise UserError(
                f"a pass is written <stage><F|B|W|BW|R|S|T|L|I|J><microbatch>[.<slice>], for example 2F0; got {text!r}"
            )
        stage, kind, microbatch, slice_ = match.groups()
        return cls(int(stage), Kind(kind), int(microbatch), int(slice_ or 0))


AND = "&"
"""Joins the text of two passes that run at the same time."""


def groups(row: Iterable[Pass], pairs: Collection[Pass]) -> Iterator[tuple[Pass, ...]]:
    """The passes of a row in groups that run at the same time: pairs and single passes."""
    return _pairs_and_others(row, pairs) if pairs else zip(row)  # zip is faster


def _pairs_and_others(row: Iterable[Pass], pairs: Collection[Pass]) -> Iterator[tuple[Pass, ...]]:
    passes = iter(row)
    for p in passes:
        other = next(passes, None) if p in pairs else None
        yield (p,) if other is None else (p, other)


def later(resource: _Resource, by: int) -> _Resource:
    """Return a pass for a microbatch that is ``by`` later, or a tuple, such as a value or message, of such passes."""
    moved: object = resource
    if isinstance(resource, Pass):
        stage, kind, microbatch, slice_ = resource
        moved = Pass(stage, kind, microbatch + by, slice_)
    elif isinstance(resource, tuple):
        make = getattr(type(resource), "_make", tuple)  # a named tuple, or a plain one
        moved = make([later(part, by) for part in resource])
    return moved  # type: ignore[return-value]
