"""Lower bounds for schedules with vocabulary parallelism.

The passes of the vocabulary only delay those of the stages, so a bound without them holds as well. These bounds count
their work, and the barriers at the turn: until the first B of a rank, some microbatch travels to the last stage, its S
runs on every rank (with algorithm 1 also its T), and it travels back. In this time the rank runs forwards and the S and
T of these microbatches, as many as memory allows, and any I; for the rest, it is idle. Its first F waits for tokens and
for all I.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatron.zero_bubble.core.analysis.bounds.setting import Setting
from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.core.costs import PassCosts
from megatron.zero_bubble.core.costs.vocabulary import VocabularyCosts, required
from megatron.zero_bubble.core.ir.vocabulary import Algorithm


class VocabularyBound(NamedTuple):
    """A bound in ms, its reason, and its rank."""

    value_ms: float
    reason: str
    rank: int


def by_vocabulary(setting: Setting, costs: PassCosts, algorithm: Algorithm, objective: Metric) -> VocabularyBound:
    figures = required(costs.vocabulary)
    bounds = (
        bound
        for rank in range(setting.num_ranks)
        for bound in _bounds(setting, costs, figures, algorithm, rank, objective)
    )
    return max(bounds, key=lambda bound: bound.value_ms)


def _bounds(
    s: Setting, costs: PassCosts, figures: VocabularyCosts, algorithm: Algorithm, rank: int, objective: Metric
) -> Iterator[VocabularyBound]:
    stages, shards = s.stages(rank), figures.output_ms[rank] + figures.output_wgrad_ms[rank]
    work, lookups = s.work[rank] + s.m * figures.work_ms(rank), s.m * figures.embedding_ms[rank]
    # Until the first B, forwards and the S and T of microbatches whose forwards have run fit into the memory.
    forwards = sum(s.f[stage] * min(s.m, s.fits(s.a[stage], s.limit[rank])) for stage in stages)
    together = min(s.m, s.fits(s.whole(rank), s.limit[rank]))
    turn = s.round_trip(stages[0], stages[-1]) + _turn_ms(s, costs, figures, algorithm)
    idle = max(0.0, turn - forwards - together * shards - lookups)
    yield VocabularyBound(work + idle, "work, and the way to the barriers and back", rank)
    if objective == "makespan":
        late = s.forward_at[stages[0]] + _first_forward_ms(s, costs, figures)
        yield VocabularyBound(late + work - lookups + idle, "way to a rank, its work, and the barriers", rank)


def _turn_ms(s: Setting, costs: PassCosts, figures: VocabularyCosts, algorithm: Algorithm) -> float:
    """The least time from the end of F of the last stage to the start of its B."""
    root = s.placement.stage_to_rank[-1]
    rounds = (figures.output_ms,) if algorithm == 2 else (figures.output_ms, figures.output_wgrad_ms)
    return sum(
        max(_hop(costs, figures, root, rank) + ms[rank] + _hop(costs, figures, rank, root) for rank in range(len(ms)))
        for ms in rounds
    )


def _first_forward_ms(s: Setting, costs: PassCosts, figures: VocabularyCosts) -> float:
    """The least time to the start of F of stage 0: rank 0 looks up its rows, and sends the tokens, then the others."""
    first = figures.embedding_ms[0]
    others = (
        _hop(costs, figures, 0, rank) + figures.embedding_ms[rank] + _hop(costs, figures, rank, 0)
        for rank in range(1, s.num_ranks)
    )
    return first + max(others, default=0.0)


def _hop(costs: PassCosts, figures: VocabularyCosts, source: int, target: int) -> float:
    return 0.0 if source == target else costs.comm(source, target) + figures.collective_ms
