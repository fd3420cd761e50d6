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

from megatron.zero_bubble.search.compact import compact, compact_full
from megatron.zero_bubble.search.decode import INFEASIBLE, decode
from megatron.zero_bubble.search.evaluate import evaluate
from megatron.zero_bubble.search.improve import Improved, improve, refine
from megatron.zero_bubble.search.problem import Problem, Rows, mirrored

Packed = Any
_ARRAYS = (
    *((name, ctypes.c_int32) for name in ("rank", "source", "receiver")),
    *((name, ctypes.c_double) for name in ("duration", "hop", "delta", "limit", "work", "origin")),
)


class Loops(Protocol):
    """``decode``, ``compact`` and ``improve`` for one problem; ``Packed`` rows are in whatever form suits the loops."""

    def pack(self, rows: Rows) -> Packed: ...

    def unpack(self, rows: Packed) -> Rows: ...

    def decode(self, rows: Packed, eagerness: float, target: float = INFEASIBLE) -> tuple[float, float]:
        """The cost, and its mean over ranks."""
        ...

    def full(self, rows: Packed, eagerness: float, target: float = INFEASIBLE) -> Rows:
        """The rows with W's."""
        ...

    def compact(
        self, rows: Packed, most_held: list[int] | None = None, haste: float = 0.0, backwards: bool = False
    ) -> Packed | None:
        """``backwards``: on the mirrored problem."""
        ...

    def improve(self, start: Improved, eagerness: float, tries: int, heat: float) -> Improved:
        """From and to packed rows."""
        ...

    def compact_full(
        self, full: Rows, most_held: list[int] | None = None, haste: float = 0.0, backwards: bool = False
    ) -> Rows | None: ...

    def evaluate(self, full: Rows) -> tuple[float, float]:
        """As ``decode``, of rows with W's."""
        ...

    def refine(self, full: Rows, tries: int, heat: float) -> tuple[float, Rows]:
        """The cost of rows with W's after ``tries`` moves, and the rows."""
        ...


class Reference:
    """In Python."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def pack(self, rows: Rows) -> Packed:
        return rows

    def unpack(self, rows: Packed) -> Rows:
        return rows

    def decode(self, rows: Packed, eagerness: float, target: float = INFEASIBLE) -> tuple[float, float]:
        found = decode(self._problem, rows, eagerness, target)
        return found.cost, found.mean

    def full(self, rows: Packed, eagerness: float, target: float = INFEASIBLE) -> Rows:
        return decode(self._problem, rows, eagerness, target).rows

    def compact(
        self, rows: Packed, most_held: list[int] | None = None, haste: float = 0.0, backwards: bool = False
    ) -> Packed | None:
        if not backwards:
            return compact(self._problem, rows, most_held, haste)
        denser = compact(self._problem.mirrored, mirrored(rows), most_held, haste)
        return denser and mirrored(denser)

    def improve(self, start: Improved, eagerness: float, tries: int, heat: float) -> Improved:
        return improve(self._problem, start, eagerness, tries, heat)

    def compact_full(
        self, full: Rows, most_held: list[int] | None = None, haste: float = 0.0, backwards: bool = False
    ) -> Rows | None:
        return compact_full(self._problem, full, most_held, haste, backwards)

    def evaluate(self, full: Rows) -> tuple[float, float]:
        found = evaluate(self._problem, full)
        return found.cost, found.mean

    def refine(self, full: Rows, tries: int, heat: float) -> tuple[float, Rows]:
        found = refine(self._problem, Improved(evaluate(self._problem, full).cost, 0.0, full), tries, heat)
        return found.cost, found.rows


class Compiled:
    """In C++; packed rows lie flat, rank behind rank."""

    def __init__(self, problem: Problem, library: ctypes.CDLL) -> None:
        self._library = library
        self._most_held = [problem.num_microbatches] * problem.num_stages
        self._forward, self._mirrored = _CProblem.of(problem), _CProblem.of(problem.mirrored)
        stages = [len(problem.placement.stages_of(rank)) for rank in range(problem.num_ranks)]
        self._short, self._full = (
            list(pairwise(accumulate((kinds * problem.num_microbatches * count for count in stages), initial=0)))
            for kinds in (2, 3)
        )
        self._buffer = (ctypes.c_int32 * self._full[-1][1])()

    def pack(self, rows: Rows) -> Packed:
        codes = array("i", chain.from_iterable(rows))
        return (ctypes.c_int32 * len(codes)).from_buffer(codes)

    def unpack(self, rows: Packed) -> Rows:
        return [rows[first:last] for first, last in self._short]

    def decode(self, rows: Packed, eagerness: float, target: float = INFEASIBLE) -> tuple[float, float]:
        mean = ctypes.c_double()
        cost = self._library.zb_decode(self._forward, rows, eagerness, target, mean, self._buffer)
        return cost, mean.value

    def full(self, rows: Packed, eagerness: float, target: float = INFEASIBLE) -> Rows:
        self.decode(rows, eagerness, target)
        return [self._buffer[first:last] for first, last in self._full]

    def compact(
        self, rows: Packed, most_held: list[int] | None = None, haste: float = 0.0, backwards: bool = False
    ) -> Packed | None:
        held = most_held or self._most_held
        result = type(rows).from_buffer_copy(rows)
        if backwards:
            self._library.zb_mirror(self._forward, result, False)
        problem = self._mirrored if backwards else self._forward
        if not self._library.zb_compact(problem, result, (ctypes.c_int32 * len(held))(*held), haste):
            return None
        if backwards:
            self._library.zb_mirror(self._forward, result, False)
        return result

    def improve(self, start: Improved, eagerness: float, tries: int, heat: float) -> Improved:
        cost, target = ctypes.c_double(start.cost), ctypes.c_double(start.target)
        rows = type(start.rows).from_buffer_copy(start.rows)
        self._library.zb_improve(self._forward, rows, cost, target, eagerness, tries, heat)
        return Improved(cost.value, target.value, rows)

    def compact_full(
        self, full: Rows, most_held: list[int] | None = None, haste: float = 0.0, backwards: bool = False
    ) -> Rows | None:
        rows, held = self.pack(full), (ctypes.c_int32 * len(self._most_held))(*(most_held or self._most_held))
        if backwards:
            self._library.zb_mirror(self._forward, rows, True)
        problem = self._mirrored if backwards else self._forward
        if not self._library.zb_compact_full(problem, rows, held, haste, backwards):
            return None
        if backwards:
            self._library.zb_mirror(self._forward, rows, True)
        return [rows[first:last] for first, last in self._full]

    def evaluate(self, full: Rows) -> tuple[float, float]:
        mean = ctypes.c_double()
        cost = self._library.zb_evaluate(self._forward, self.pack(full), mean)
        return cost, mean.value

    def refine(self, full: Rows, tries: int, heat: float) -> tuple[float, Rows]:
        rows, mean = self.pack(full), ctypes.c_double()
        cost = ctypes.c_double(self._library.zb_evaluate(self._forward, rows, mean))
        self._library.zb_refine(self._forward, rows, cost, tries, heat)
        return cost.value, [rows[first:last] for first, last in self._full]


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
    problem, codes, number = ctypes.POINTER(_CProblem), ctypes.POINTER(ctypes.c_int32), ctypes.c_double
    result = ctypes.POINTER(number)
    found.zb_decode.argtypes = [problem, codes, number, number, result, codes]
    found.zb_decode.restype = number
    found.zb_mirror.argtypes = [problem, codes, ctypes.c_int32]
    found.zb_mirror.restype = None
    found.zb_compact.argtypes = [problem, codes, codes, number]
    found.zb_compact.restype = ctypes.c_int32
    found.zb_compact_full.argtypes = [problem, codes, codes, number, ctypes.c_int32]
    found.zb_compact_full.restype = ctypes.c_int32
    found.zb_improve.argtypes = [problem, codes, result, result, number, ctypes.c_int64, number]
    found.zb_improve.restype = None
    found.zb_evaluate.argtypes = [problem, codes, result]
    found.zb_evaluate.restype = number
    found.zb_refine.argtypes = [problem, codes, result, ctypes.c_int64, number]
    found.zb_refine.restype = None
    return found


class _CProblem(ctypes.Structure):
    """``zb_problem`` of csrc/planner.cpp; it keeps the arrays it points to alive."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("num_ranks", "num_stages", "num_microbatches")),
        *((name, ctypes.POINTER(kind)) for name, kind in _ARRAYS),
    )

    @classmethod
    def of(cls, problem: Problem) -> _CProblem:
        tables = problem.tables._asdict() | {name: getattr(problem, name) for name in ("limit", "work", "origin")}
        arrays = [(kind * len(tables[name]))(*tables[name]) for name, kind in _ARRAYS]
        return cls(problem.num_ranks, problem.num_stages, problem.num_microbatches, *arrays)
