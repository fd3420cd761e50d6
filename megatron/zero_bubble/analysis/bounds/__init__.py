"""How short no schedule can be: lower bounds on span and makespan for given costs, memory limit and placement.

The difference between a schedule and the bound, the gap, is a certificate: no schedule, known or unknown, is better by
more than that. Every bound here holds for every schedule of whole microbatches on the placement, with split or fused
backwards, in any order of microbatches. ``setting`` says why so many can be treated as one kind; ``windows`` has the
closed forms and ``paths`` the longest paths with Jackson's preemptive one-machine schedule, with their derivations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.zero_bubble.analysis.bounds.paths import Paths
from megatron.zero_bubble.analysis.bounds.setting import Setting
from megatron.zero_bubble.analysis.bounds.windows import by_area, by_fill, by_head_chain, by_waits
from megatron.zero_bubble.analysis.timeline import Metric
from megatron.zero_bubble.costs import PassCosts, PassMemory
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.ir import Placement

__all__ = ["Bound", "least_memory", "lower_bound"]

_EFFORT = 120_000
"""How many passes the longest-path bounds may visit, all origins together: about half a second."""


@dataclass(frozen=True)
class Bound:
    """No schedule is shorter than ``value_ms``; ``reason`` names the bound that says so, ``rank`` where (or None)."""

    value_ms: float
    reason: str
    rank: int | None = None

    def gap(self, cost_ms: float) -> float:
        """The part of ``cost_ms`` by which a better schedule could at most be shorter; within rounding of 0 it is 0."""
        gap = (cost_ms - self.value_ms) / cost_ms if cost_ms > 0 else 0.0
        return gap if abs(gap) > 1e-9 else 0.0


def least_memory(memory: PassMemory, placement: Placement, *, fused: bool = False) -> tuple[float, ...]:
    """The smallest limits, one a rank, that admit a schedule, in the unit of ``memory``: one microbatch at a time.

    Before a rank's first B its chunks all ran F; a B may leave more for its W than it frees, a BW leaves nothing.
    """
    peaks = []
    for rank in range(placement.num_ranks):
        kept = peak = 0.0
        for stage in placement.stages_of(rank):
            peak = max(peak, kept if fused else kept + memory.wgrad[stage])
            kept += memory.activation[stage]
        peaks.append(max(peak, kept))
    return tuple(peaks)


def lower_bound(
    costs: PassCosts,
    memory: PassMemory,
    placement: Placement,
    num_microbatches: int,
    memory_limit: float | Sequence[float] | None,
    objective: Metric = "span",
    fused: bool = False,
    effort: int = _EFFORT,
) -> Bound:
    """A lower bound on ``objective`` (ms) over all schedules that keep within ``memory_limit`` on every rank.

    ``memory_limit`` is in the unit of ``memory``, one figure or one a rank, None for no limit. ``fused`` asks for
    schedules with fused backwards only, whose bound is higher. Closed forms are always used; longest paths, of at most
    ``effort`` passes in sum, from as many ranks as that allows: the answer does not depend on the machine's speed.

    Raises:
        UserError: when the limit admits no schedule, naming the least that does, or when figures are for another
            number of stages.
    """
    limit = _limits(memory_limit, placement.num_ranks)
    _check(costs, memory, placement, num_microbatches, limit)
    setting = Setting.of(costs, memory, placement, num_microbatches, limit, fused)
    closed = _closed_forms(setting, objective)
    best = max(closed, key=lambda bound: bound.value_ms)
    chain = by_head_chain(setting, objective, best.value_ms)
    if chain > best.value_ms:
        best = Bound(chain, "waits of neighbouring ranks")
    paths = Paths(setting)
    for rank in _origins(closed, objective, effort // len(paths.length)):
        value = paths.bound(rank)
        if value > best.value_ms * (1 + 1e-12):
            best = Bound(value, "longest paths through one rank", rank)
    return best


def _closed_forms(setting: Setting, objective: Metric) -> list[Bound]:
    """Every closed form on every rank."""
    forms = {
        "work": setting.work,
        "work and waits for the first and last backward": by_waits(setting),
        "memory times time": by_area(setting),
        "way to a rank, its work, and back": by_fill(setting),
    }
    bounds = []
    for reason, spans in forms.items():
        for rank, span in enumerate(spans):
            late = setting.forward_at[setting.stages(rank)[0]] if objective == "makespan" else 0.0
            bounds.append(Bound(late + span, reason, rank))
    return bounds


def _origins(closed: list[Bound], objective: Metric, affordable: int) -> list[int | None]:
    """From which ranks to follow longest paths, the ones with the highest closed forms first; None for the makespan."""
    if affordable < 1:
        return []
    if objective == "makespan":
        return [None]
    highest: dict[int | None, float] = {}
    for bound in closed:
        highest[bound.rank] = max(highest.get(bound.rank, 0.0), bound.value_ms)
    return sorted(highest, key=lambda rank: -highest[rank])[:affordable]


def _limits(limit: float | Sequence[float] | None, num_ranks: int) -> tuple[float, ...]:
    """One limit a rank; infinity for none."""
    if limit is None:
        return (math.inf,) * num_ranks
    limits = tuple(limit) if isinstance(limit, Sequence) else (limit,) * num_ranks
    if len(limits) != num_ranks:
        raise UserError(f"a memory limit must be one figure, or one for each of the {num_ranks} ranks; got {limits}")
    return limits


def _check(costs: PassCosts, memory: PassMemory, placement: Placement, m: int, limits: Sequence[float]) -> None:
    for what, figures in (("costs", costs), ("memory", memory)):
        if figures.num_stages != placement.num_stages:
            raise UserError(
                f"{what} must have one figure per stage; the placement has {placement.num_stages} stages and "
                f"{what} {figures.num_stages}; build both from the same placement"
            )
    if m < 1:
        raise UserError(f"num_microbatches must be 1 or more; got {m}")
    for rank, (least, limit) in enumerate(zip(least_memory(memory, placement, fused=True), limits, strict=True)):
        if limit < least * (1 - 1e-9):
            raise UserError(
                f"the memory limit must leave room for one microbatch, {least:.6g} on rank {rank}; got {limit:.6g}; "
                "raise the limit or split the model over more ranks"
            )
