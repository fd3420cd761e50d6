"""The hot loops of the search: compiled from csrc/planner.cpp if that was built, else the Python reference.

The reference (``compact``, ``refill``, ``refine``, ``evaluate``, ``rows``) is the fallback without a compiler, and what
the compiled loops are tested against. Both give bit-identical results; the compiled ones are about fifty times as fast.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, Protocol, TypeVar

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.search.compact import compact
from megatron.zero_bubble.core.search.evaluate import Cost, evaluate
from megatron.zero_bubble.core.search.problem import Problem, Rows
from megatron.zero_bubble.core.search.refill import Eagerness, refill
from megatron.zero_bubble.core.search.refine import refine
from megatron.zero_bubble.core.search.rows import times

Packed = Any
"""Rows in the form that the loops use, compiled or not."""
_Packed = TypeVar("_Packed")


class Loops(Protocol[_Packed]):
    """``evaluate``, ``compact``, ``refill`` and ``refine`` for one problem; ``evaluate`` returns the fields of a
    ``Cost``, and ``starts`` the start of every pass in ms by rank and place, or None for rows that deadlock.
    """

    def pack(self, rows: Rows) -> _Packed: ...

    def unpack(self, rows: _Packed) -> Rows: ...

    def evaluate(self, rows: _Packed) -> tuple[float, float]: ...

    def starts(self, rows: _Packed) -> list[list[float]] | None: ...

    def compact(
        self, rows: _Packed, most_held: list[int] | None = None, haste: float = 0.0, backwards: bool = False
    ) -> _Packed | None: ...

    def refill(self, rows: _Packed, eagerness: Eagerness, target: float) -> _Packed | None: ...

    def refine(self, rows: _Packed, tries: int, heat: float, seed: int) -> tuple[float, _Packed]: ...


class Reference:
    """The loops in Python; packed rows are the rows themselves."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def pack(self, rows: Rows) -> Rows:
        return rows

    def unpack(self, rows: Rows) -> Rows:
        return rows

    def evaluate(self, rows: Rows) -> Cost:
        return evaluate(self._problem, rows)

    def starts(self, rows: Rows) -> list[list[float]] | None:
        found = times(self._problem, rows, self._problem.fused(rows)).starts
        return found if all(len(a) == len(b) for a, b in zip(found, rows, strict=True)) else None

    def compact(
        self, rows: Rows, most_held: list[int] | None = None, haste: float = 0.0, backwards: bool = False
    ) -> Rows | None:
        return compact(self._problem, rows, most_held, haste, backwards)

    def refill(self, rows: Rows, eagerness: Eagerness, target: float) -> Rows | None:
        return refill(self._problem, rows, eagerness, target)

    def refine(self, rows: Rows, tries: int, heat: float, seed: int) -> tuple[float, Rows]:
        return refine(self._problem, rows, tries, heat, seed)


def loops(problem: Problem) -> Loops[Packed]:
    """Return the fastest available loops for ``problem``.

    Raises:
        UserError: as ``compiled`` does.
    """
    make = compiled() or Reference
    return make(problem)


def compiled_module() -> Any:
    """Return the compiled module; None if the package was installed without it.

    Raises:
        UserError: as ``compiled`` does.
    """
    if find_spec("megatron.zero_bubble.core.search._planner") is None:
        return None
    try:
        from megatron.zero_bubble.core.search import _planner as planner
    except ImportError as error:
        raise UserError(
            f"the compiled search does not load from {error.path} ({error}); if the sources changed since its build, "
            "install this package again, or delete that file to search in Python, which takes longer",
            everywhere=False,
        ) from error
    return planner


@cache
def compiled() -> Callable[[Problem], Loops[Packed]] | None:
    """Return the constructor of the compiled loops; None if the package was installed without them.

    Raises:
        UserError: when the compiled file exists but does not load; ignoring this would silently change plans.
    """
    planner = compiled_module()
    if planner is None:
        return None

    def columns(problem: Problem) -> Any:
        return planner.Problem(
            num_ranks=problem.num_ranks,
            num_stages=problem.num_stages,
            num_microbatches=problem.num_microbatches,
            limit=problem.limit,
            work=problem.work,
            origin=problem.origin,
            **problem.tables._asdict(),
        )

    return lambda problem: planner.Planner(columns(problem), columns(problem.mirrored))
