"""The moves of pairs: compiled from csrc/planner.cpp if that was built, else the Python reference in ``pair_moves``.

Both give the same orders; the compiled moves are about fifty times as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.core.ir import Pass
from megatron.zero_bubble.core.ir.passes import BW, B, F, W
from megatron.zero_bubble.core.search.loops import compiled_module
from megatron.zero_bubble.core.search.pair_moves import improved
from megatron.zero_bubble.core.search.pair_tables import PairTables, Row, Step

Improve = Callable[[Sequence[Row], float, Metric, int, int], tuple[float, list[Row]]]
"""As ``improved``, for the tables that it was made for."""
_KINDS = (F, B, W, BW)


def improver(tables: PairTables) -> Improve:
    """Return the fastest available moves.

    Raises:
        UserError: as ``loops.compiled`` does.
    """
    module = compiled_module()
    if module is None:
        return lambda rows, limit, objective, tries, seed: improved(tables, rows, limit, objective, tries, seed)
    on, m = tables.placement, tables.num_microbatches
    chunks = [on.chunk_of(stage) for stage in range(on.num_stages)]
    planner = module.PairPlanner(
        num_stages=on.num_stages,
        num_microbatches=m,
        most_chunks=max(chunks) + 1,
        chunk=chunks,
        times=_times(tables, chunks),
        forward_hop=tables.hops[0],
        backward_hop=tables.hops[1],
        change=[sum(tables.memory.changes(Pass(s, kind, 0))) for kind in _KINDS for s in range(on.num_stages)],
    )

    def code(p: Pass) -> int:
        return (_KINDS.index(p.kind) * on.num_stages + p.stage) * m + p.microbatch

    def step(first: int, second: int) -> Step:
        codes = (first,) if second < 0 else (first, second)
        return tables.step(
            tuple(Pass(each // m % on.num_stages, _KINDS[each // m // on.num_stages], each % m) for each in codes)
        )

    def improve(rows: Sequence[Row], limit: float, objective: Metric, tries: int, seed: int) -> tuple[float, list[Row]]:
        packed = [[(code(own.works[0]), code(own.works[1]) if own.works[1:] else -1) for own in row] for row in rows]
        ms, found = planner.improve(packed, limit, objective == "span", tries, seed)
        return ms, [[step(*op) for op in row] for row in found]

    return improve


def _times(tables: PairTables, chunks: Sequence[int]) -> list[float]:
    """The twelve numbers of every single pass by kind and stage, then of every pair by the stage of its F, the chunk of
    its backward, and whether that is fused; zeros for chunks that a rank does not have.
    """
    on = tables.placement
    stages, most = range(on.num_stages), max(chunks) + 1
    found: list[float] = []

    def add(*works: Pass) -> None:
        own = tables.step(works)
        for times in (own.computed, own.sent, own.ends[0], own.ends[-1]):
            found.extend(times)

    for kind in _KINDS:
        for stage in stages:
            add(Pass(stage, kind, 0))
    for stage in stages:
        backwards = on.stages_of(on.stage_to_rank[stage])
        for chunk in range(most):
            for kind in (B, BW):
                if chunk < len(backwards):
                    add(Pass(stage, F, 0), Pass(backwards[chunk], kind, 0))
                else:
                    found.extend([0.0] * 12)
    return found
