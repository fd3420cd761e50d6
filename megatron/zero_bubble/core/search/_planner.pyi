# Types of csrc/planner.cpp, which setup.py builds if it finds pybind11 and a C++ compiler.
from collections.abc import Sequence
from typing import final

from megatron.zero_bubble.core.search.problem import Rows
from megatron.zero_bubble.core.search.refill import Eagerness

@final
class Problem:
    def __init__(
        self,
        *,
        num_ranks: int,
        num_stages: int,
        num_microbatches: int,
        rank: Sequence[int],
        source: Sequence[int],
        successor: Sequence[int],
        wgrad: Sequence[int],
        receiver: Sequence[int],
        duration: Sequence[float],
        hop: Sequence[float],
        delta: Sequence[float],
        limit: Sequence[float],
        work: Sequence[float],
        origin: Sequence[float],
    ) -> None: ...

@final
class PackedRows: ...

@final
class Planner:
    def __init__(self, problem: Problem, mirrored: Problem) -> None: ...
    def pack(self, rows: Rows) -> PackedRows: ...
    def unpack(self, rows: PackedRows) -> Rows: ...
    def evaluate(self, rows: PackedRows) -> tuple[float, float]: ...
    def starts(self, rows: PackedRows) -> list[list[float]] | None: ...
    def compact(
        self, rows: PackedRows, most_held: list[int] | None = None, haste: float = 0.0, backwards: bool = False
    ) -> PackedRows | None: ...
    def refill(self, rows: PackedRows, eagerness: Eagerness, target: float) -> PackedRows | None: ...
    def refine(self, rows: PackedRows, tries: int, heat: float, seed: int) -> tuple[float, PackedRows]: ...

@final
class PairPlanner:
    def __init__(
        self,
        *,
        num_stages: int,
        num_microbatches: int,
        most_chunks: int,
        chunk: Sequence[int],
        times: Sequence[float],
        forward_hop: Sequence[float],
        backward_hop: Sequence[float],
        change: Sequence[float],
    ) -> None: ...
    def improve(
        self, rows: list[list[tuple[int, int]]], limit: float, of_span: bool, tries: int, seed: int
    ) -> tuple[float, list[list[tuple[int, int]]]]: ...
