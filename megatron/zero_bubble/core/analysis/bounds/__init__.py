"""Lower bounds on the span and makespan of any schedule, for given costs, memory limit and placement.

The gap between a schedule and the bound is a certificate: no schedule, known or unknown, is shorter by more than the
gap. Every bound holds for all schedules of whole microbatches, or of given slices of them, on the placement, with split
or fused backwards, and any order of microbatches. ``setting`` explains why these schedules can be treated alike;
``windows`` and ``ways`` derive the bounds in closed form, ``paths`` those by longest paths with Jackson's preemptive
one-machine schedule, and ``trial`` those of small pipelines, by contradiction. Slices have bounds of their own
(``sliced``), and vocabulary parallelism has bounds in addition (``vocabulary``, and ``paths`` with its passes). With
offloading, memory limits the length in another way (``offload``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from megatron.zero_bubble.core.analysis.bounds.offload import by_offload
from megatron.zero_bubble.core.analysis.bounds.paths import Paths
from megatron.zero_bubble.core.analysis.bounds.setting import Setting, must_fuse
from megatron.zero_bubble.core.analysis.bounds.sliced import by_slices
from megatron.zero_bubble.core.analysis.bounds.trial import Effort, by_contradiction
from megatron.zero_bubble.core.analysis.bounds.vocabulary import by_vocabulary
from megatron.zero_bubble.core.analysis.bounds.ways import by_ways
from megatron.zero_bubble.core.analysis.bounds.windows import by_area, by_head_chain, by_waits
from megatron.zero_bubble.core.analysis.score import ROUNDING, limits_of
from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Chain, Placement
from megatron.zero_bubble.core.ir.vocabulary import Algorithm, Vocabulary
from megatron.zero_bubble.core.ir.workload import Workload

__all__ = ["Bound", "least_memory", "lower_bound", "lower_bound_with_offload"]

_EFFORT = 120_000
"""Number of passes that the longest-path bounds may visit in total over all origins: about half a second."""
_ONE_RANK = 400_000
"""Up to this number of passes, the longest paths are computed from one rank at least: about a second."""


_COMPARED = 2.5
"""Pairs of passes that may be compared in small pipelines to refute an end, per visited pass of the effort."""


@dataclass(frozen=True)
class Bound:
    """No schedule is shorter than ``value_ms``; ``reason`` names the bound, and ``rank`` its rank, if any."""

    value_ms: float
    reason: str
    rank: int | None = None

    def gap(self, cost_ms: float) -> float:
        """Return the largest share of ``cost_ms`` that a better schedule could save; rounding errors count as 0."""
        gap = (cost_ms - self.value_ms) / cost_ms if cost_ms > 0 else 0.0
        return gap if abs(gap) > ROUNDING else 0.0


def least_memory(memory: PassMemory, placement: Placement, *, fused: bool = False) -> tuple[float, ...]:
    """Return the smallest limit per rank that admits a schedule, in the unit of ``memory``: one microbatch at a time.

    All chunks of a rank run F before its first B. A B may leave more for its W than it frees; a BW leaves nothing.
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
    work: Workload,
    memory_limit: float | Sequence[float] | None,
    objective: Metric = "span",
    fused: bool = False,
    effort: int | None = _EFFORT,
) -> Bound:
    """Compute a lower bound on ``objective`` (ms) over all schedules of ``work`` within ``memory_limit`` on every rank.

    ``memory_limit`` is in the unit of ``memory``: one figure, or one figure per rank, or None for no limit. ``fused``
    restricts the bound to schedules with fused backwards, for which it is higher. Closed forms are always computed, and
    without ``effort`` (None) nothing else; longest paths are computed from as many ranks as fit into ``effort`` visited
    passes, so the result does not depend on the speed of the machine. Slices have a bound of their own; ``costs`` must
    have the times of passes of the vocabulary. In small pipelines, what is left of ``effort`` makes heads and tails
    longer, and ends that no order of passes reaches are refuted.

    Raises:
        UserError: when the limit admits no schedule (the message gives the least limit that does), or when figures are
            for another number of stages.
    """
    placement, limit = work.placement, limits_of(memory_limit, work.placement.num_ranks)
    _check(costs, memory, placement, work.num_microbatches, limit)
    if len(work.slices) > 1:
        return Bound(*by_slices(costs, memory, work, limit, objective, fused))
    setting = Setting.of(costs, memory, placement, work.num_microbatches, limit, fused)
    bound = _of_setting(setting, costs, objective, effort, work.vocabulary)
    if fused or not (stages := list(must_fuse(memory, placement, limit))):
        return bound
    with_fused = _of_setting(setting.with_fused(stages), costs, objective, effort, work.vocabulary)
    return max(bound, with_fused, key=lambda bound: bound.value_ms)


def _of_setting(
    setting: Setting, costs: PassCosts, objective: Metric, effort: int | None, vocabulary: Algorithm | None
) -> Bound:
    """Compute the best bound of schedules of whole microbatches."""
    closed = _closed_forms(setting, objective)
    best = max(closed, key=lambda bound: bound.value_ms)
    if vocabulary is not None:
        best = max(best, Bound(*by_vocabulary(setting, costs, vocabulary, objective)), key=lambda bound: bound.value_ms)
    chain = by_head_chain(setting, objective, best.value_ms)
    if chain > best.value_ms:
        best = Bound(chain, "waits of neighbouring ranks")
    if effort is None:
        return best
    flow, passes = Chain(setting.num_stages), 3 * setting.num_stages * setting.m
    effort = max(effort, passes if passes <= _ONE_RANK else 0)
    if vocabulary is not None:
        with_shards = Paths(setting, costs, Vocabulary(flow, setting.num_ranks, vocabulary))
        affordable = max(effort // with_shards.size, int(passes <= _ONE_RANK))
        best = _by_paths(with_shards.bound, _origins(closed, objective, affordable), best)
    paths = Paths(setting, costs, flow, _reach(setting, objective, effort))
    best = _by_paths(paths.bound, _origins(closed, objective, effort // paths.size), best)
    return _by_contradiction(paths, objective, best, _COMPARED * effort) if paths.reach == setting.m else best


def lower_bound_with_offload(
    costs: PassCosts,
    memory: PassMemory,
    work: Workload,
    memory_limit: float | None,
    objective: Metric = "span",
) -> Bound:
    """Compute the bound for schedules that may also move activations to host memory, in ``costs.host_ms`` per stage and
    direction. Arguments as of ``lower_bound``; any limit of host memory only makes schedules longer.

    Of schedules of slices, it does not count the device memory.

    Raises:
        UserError: when figures are for another number of stages.
    """
    free = lower_bound(costs, memory, work, None, objective)
    if len(work.slices) > 1:
        return free
    placement = work.placement
    limit = limits_of(memory_limit, placement.num_ranks)
    setting = Setting.of(costs, memory, placement, work.num_microbatches, limit, fused=False)
    late = setting.forward_at if objective == "makespan" else (0.0,) * placement.num_stages
    bounds = (
        Bound(late[placement.stages_of(rank)[0]] + ms, "memory times time, and the lane of the copies", rank)
        for rank, ms in enumerate(by_offload(setting, costs.host_ms))
    )
    return max((free, *bounds), key=lambda bound: bound.value_ms)


def _by_paths(bound: Callable[[int | None], float], origins: Iterable[int | None], best: Bound) -> Bound:
    for rank in origins:
        value = bound(rank)
        if value > best.value_ms * (1 + 1e-12):
            best = Bound(value, "longest paths through one rank", rank)
    return best


def _by_contradiction(paths: Paths, objective: Metric, best: Bound, pairs: float) -> Bound:
    """Raise ``best`` for a pipeline so small that all passes of a rank compete with each other in ``paths``."""
    effort = Effort(pairs)
    ranks: Iterable[int | None] = range(paths.setting.num_ranks) if objective == "span" else [None]
    for shaved, rank in product((False, True), ranks):
        value = by_contradiction(paths, rank, best.value_ms, effort, shaved)
        if value > best.value_ms * (1 + 1e-12):
            best = Bound(value, "contradictions of every order of passes", rank)
    return best


def _closed_forms(setting: Setting, objective: Metric) -> list[Bound]:
    forms = {
        "work": setting.work,
        "work and waits for the first and last backward": by_waits(setting),
        "memory times time": by_area(setting),
        "way to a rank, its work, and back": by_ways(setting),
    }
    bounds = []
    for reason, spans in forms.items():
        for rank, span in enumerate(spans):
            late = setting.forward_at[setting.stages(rank)[0]] if objective == "makespan" else 0.0
            bounds.append(Bound(late + span, reason, rank))
    return bounds


def _reach(s: Setting, objective: Metric, effort: int) -> int:
    """Return the number of microbatches that can compete with each pass if all longest paths fit into ``effort``."""
    origins = 1 if objective == "makespan" else s.num_ranks
    of_one_rank = 3 * max(len(s.stages(rank)) for rank in range(s.num_ranks))
    return min(s.m, effort // (origins * 3 * s.num_stages * s.m * of_one_rank))


def _origins(closed: list[Bound], objective: Metric, affordable: int) -> list[int | None]:
    """Return the ranks from which to compute longest paths, highest closed form first; None stands for the makespan."""
    if affordable < 1:
        return []
    if objective == "makespan":
        return [None]
    highest: dict[int | None, float] = {}
    for bound in closed:
        highest[bound.rank] = max(highest.get(bound.rank, 0.0), bound.value_ms)
    return sorted(highest, key=lambda rank: -highest[rank])[:affordable]


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
        if limit < least * (1 - ROUNDING):
            raise UserError(
                f"the memory limit must leave room for one microbatch, {least:.6g} on rank {rank}; got {limit:.6g}; "
                "raise the limit or split the model over more ranks"
            )
