"""The search's hot loops: compiled from csrc/planner.cpp where that was built, else their references in Python.

Both give the same results to the last bit; the compiled ones are about fifty times as fast.
"""

from __future__ import annotations

import ctypes
from array import array
from functools import cache
from importlib.util import find_spec
from itertools import accumulate, chain, pairwise
from typing import Any, Protocol
from weakref import finalize

from megatron.zero_bubble.search.compact import compact
from megatron.zero_bubble.search.evaluate import Cost, evaluate
from megatron.zero_bubble.search.problem import Problem, Rows
from megatron.zero_bubble.search.refill import refill
from megatron.zero_bubble.search.refine import refine

Packed = Any
"""Rows in whatever form suits the loops."""
_ARRAYS: tuple[tuple[str, Any], ...] = (
    *((name, ctypes.c_int32) for name in ("rank", "source", "successor", "wgrad", "receiver")),
    *((name, ctypes.c_double) for name in ("duration", "hop", "delta", "limit", "work", "origin")),
)


class Loops(Protocol):
    """``evaluate``, ``compact``, ``refill`` and ``refine`` for one problem."""

    def pack(self, rows: Rows) -> Packed: ...

    def unpack(self, rows: Packed) -> Rows: ...

    def evaluate(self, rows: Packed) -> Cost: ...

    def compact(
        self, rows: Packed, most_held: list[int] | None = None, haste: float = 0.0, backwards: bool = False
    ) -> Packed | None: ...

    def refill(self, rows: Packed, eagerness: float, target: float) -> Packed | None: ...

    def refine(self, rows: Packed, tries: int, heat: float, seed: int) -> tuple[float, Packed]: ...


class Reference:
    """In Python."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def pack(self, rows: Rows) -> Packed:
        return rows

    def unpack(self, rows: Packed) -> Rows:
        return rows

    def evaluate(self, rows: Packed) -> Cost:
        return evaluate(self._problem, rows)

    def compact(
        self, rows: Packed, most_held: list[int] | None = None, haste: float = 0.0, backwards: bool = False
    ) -> Packed | None:
        return compact(self._problem, rows, most_held, haste, backwards)

    def refill(self, rows: Packed, eagerness: float, target: float) -> Packed | None:
        return refill(self._problem, rows, eagerness, target)

    def refine(self, rows: Packed, tries: int, heat: float, seed: int) -> tuple[float, Packed]:
        return refine(self._problem, rows, tries, heat, seed)


class Compiled:
    """In C++; packed rows lie flat, rank behind rank."""

    def __init__(self, problem: Problem, library: ctypes.CDLL) -> None:
        self._library = library
        self._unlimited = [problem.num_microbatches] * problem.num_stages
        self._forward, self._mirrored = self._open(problem), self._open(problem.mirrored)
        stages = [len(problem.placement.stages_of(rank)) for rank in range(problem.num_ranks)]
        self._bounds = list(pairwise(accumulate((3 * problem.num_microbatches * count for count in stages), initial=0)))

    def _open(self, problem: Problem) -> int:
        """A handle on the library's own memory for ``problem``."""
        arrays = _CProblem.of(problem)
        handle = self._library.zb_open(arrays)
        finalize(self, _close, self._library, handle, arrays)
        return handle

    def pack(self, rows: Rows) -> Packed:
        codes = array("i", chain.from_iterable(rows))
        return (ctypes.c_int32 * len(codes)).from_buffer(codes)

    def unpack(self, rows: Packed) -> Rows:
        return [rows[first:last] for first, last in self._bounds]

    def evaluate(self, rows: Packed) -> Cost:
        mean = ctypes.c_double()
        return Cost(self._library.zb_evaluate(self._forward, rows, mean), mean.value)

    def compact(
        self, rows: Packed, most_held: list[int] | None = None, haste: float = 0.0, backwards: bool = False
    ) -> Packed | None:
        result = type(rows).from_buffer_copy(rows)
        held = (ctypes.c_int32 * len(self._unlimited))(*(most_held or self._unlimited))
        if backwards:
            self._library.zb_mirror(self._forward, result)
        problem = self._mirrored if backwards else self._forward
        if not self._library.zb_compact(problem, result, held, haste, backwards):
            return None
        if backwards:
            self._library.zb_mirror(self._forward, result)
        return result

    def refill(self, rows: Packed, eagerness: float, target: float) -> Packed | None:
        result = type(rows)()
        return result if self._library.zb_refill(self._forward, rows, eagerness, target, result) else None

    def refine(self, rows: Packed, tries: int, heat: float, seed: int) -> tuple[float, Packed]:
        result = type(rows).from_buffer_copy(rows)
        return self._library.zb_refine(self._forward, result, tries, heat, seed), result


def loops(problem: Problem) -> Loops:
    """The fastest there are."""
    found = library()
    return Reference(problem) if found is None else Compiled(problem, found)


@cache
def library() -> ctypes.CDLL | None:
    """The compiled loops; None where the package was installed without a C++ compiler."""
    spec = find_spec("megatron.zero_bubble._planner")
    if spec is None or spec.origin is None:
        return None
    found = ctypes.CDLL(spec.origin)
    problem, rows = ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32)
    number, count, flag = ctypes.c_double, ctypes.c_int64, ctypes.c_int32
    for name, result, arguments in (
        ("zb_open", problem, [ctypes.POINTER(_CProblem)]),
        ("zb_close", None, [problem]),
        ("zb_evaluate", number, [problem, rows, ctypes.POINTER(number)]),
        ("zb_mirror", None, [problem, rows]),
        ("zb_compact", flag, [problem, rows, rows, number, flag]),
        ("zb_refill", flag, [problem, rows, number, number, rows]),
        ("zb_refine", number, [problem, rows, count, number, count]),
    ):
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found


def _close(library: ctypes.CDLL, handle: int, _arrays: _CProblem) -> None:
    """Give the memory of a handle back; until then the arrays are kept alive by being an argument of this."""
    library.zb_close(handle)


class _CProblem(ctypes.Structure):
    """``zb_problem`` of csrc/planner/problem.h; it keeps the arrays it points to alive."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("num_ranks", "num_stages", "num_microbatches")),
        *((name, ctypes.POINTER(kind)) for name, kind in _ARRAYS),
    )

    @classmethod
    def of(cls, problem: Problem) -> _CProblem:
        figures = problem.tables._asdict() | {name: getattr(problem, name) for name in ("limit", "work", "origin")}
        arrays = [(kind * len(figures[name]))(*figures[name]) for name, kind in _ARRAYS]
        return cls(problem.num_ranks, problem.num_stages, problem.num_microbatches, *arrays)
