"""Divide samples of different lengths among data-parallel replicas and their microbatches.

A replica of a pipeline meets the others once per iteration, when gradients are reduced. So replicas need equal work,
not equal numbers of microbatches (LB-Mini of arXiv 2601.19362), and megatron-core's own reduction serves them.

Replicas get their samples by the largest differencing method of Karmarkar and Karp. Inside a replica, the samples of a
microbatch are padded to the longest of them, so samples of like length belong together: a microbatch is a run of the
replica's samples in the order of their lengths, and the best runs are found by dynamic programming.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from megatron.zero_bubble.costs.lengths import LengthCost, Shape
from megatron.zero_bubble.errors import UserError

Microbatches = tuple[tuple[int, ...], ...]
"""The samples of each microbatch of a replica."""


def shape_of(microbatch: Sequence[int], lengths: Sequence[int]) -> Shape:
    """The shape of a microbatch of the given samples."""
    return Shape(len(microbatch), max(lengths[sample] for sample in microbatch))


def balance(
    lengths: Sequence[int], num_replicas: int, num_ranks: int, cost: LengthCost, most_tokens: int
) -> tuple[Microbatches, ...]:
    """Divide samples over replicas and microbatches, such that the slowest replica takes as little time as possible.

    The result depends on the arguments only. Microbatches of a replica are in the order of their lengths, which leaves
    the smallest bubbles between passes of different lengths; the longest is last.

    Args:
        lengths: the tokens of each sample.
        num_ranks: pipeline ranks of a replica.
        most_tokens: the most tokens of a microbatch, with padding.

    Returns:
        for each replica, its microbatches of indices into ``lengths``, with every sample exactly once.

    Raises:
        UserError: fewer samples than replicas, a sample without tokens, or one that is longer than a microbatch may be.
    """
    if len(lengths) < num_replicas:
        raise UserError(
            f"an iteration needs one sample or more per data-parallel replica; got {len(lengths)} samples for "
            f"{num_replicas} replicas; raise --global-batch-size"
        )
    if min(lengths) < 1 or max(lengths) > most_tokens:
        raise UserError(
            f"samples must have 1 to {most_tokens} tokens, the most of a microbatch; got {min(lengths)} to "
            f"{max(lengths)}; raise --micro-batch-size or --seq-length, or cut the samples"
        )
    costs = [cost.sample(tokens) for tokens in lengths]
    # The longest sample of a replica also fills and drains its pipeline, so it can count once per rank.
    longest = sorted(range(len(costs)), key=lambda sample: (-costs[sample], sample))[:num_replicas]
    drained = [own * num_ranks if sample in longest else own for sample, own in enumerate(costs)]
    candidates = [
        tuple(microbatches(part, lengths, num_ranks, cost, most_tokens) for part in karmarkar_karp(work, num_replicas))
        for work in (costs, drained)
    ]
    return min(candidates, key=lambda replicas: max(duration(own, lengths, num_ranks, cost) for own in replicas))


def duration(own: Microbatches, lengths: Sequence[int], num_ranks: int, cost: LengthCost) -> float:
    """The time of a replica: its microbatches one after the other, and the longest once more for every other rank."""
    times = [cost.microbatch(shape_of(microbatch, lengths)) for microbatch in own]
    return sum(times) + (num_ranks - 1) * max(times)


def karmarkar_karp(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Divide items into parts with nearly equal sums; with as many items as parts or more, no part is empty.

    Largest differencing: of all partial divisions, the two with the largest differences between their parts are merged,
    the larger parts of one with the smaller parts of the other.
    """
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for item, own in enumerate(costs):
        parts = [(own, [item]), *((0.0, []) for _ in range(num_parts - 1))]
        heapq.heappush(heap, (-own, item, parts))
    while len(heap) > 1:
        (_, item, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        merged = [(a + b, [*p, *q]) for (a, p), (b, q) in zip(one, reversed(other), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], item, merged))
    return [sorted(items) for _, items in heap[0][2]]


def microbatches(
    samples: Sequence[int], lengths: Sequence[int], num_ranks: int, cost: LengthCost, most_tokens: int
) -> Microbatches:
    """Divide the samples of a replica into microbatches of at most ``most_tokens``, the shortest samples first.

    Fewer microbatches have fewer fixed costs, but more padding, and a larger one fills and drains the pipeline. So the
    runs with the least sum are found for several limits of a microbatch's time, from that of the longest sample on.
    """
    order = sorted(samples, key=lambda sample: (lengths[sample], sample))
    of_order = [lengths[sample] for sample in order]
    limit = cost.microbatch(Shape(1, of_order[-1]))
    found = []
    while True:
        runs = _runs(of_order, cost, most_tokens, limit)
        found.append(tuple(tuple(order[start:end]) for start, end in runs))
        if limit >= cost.microbatch(Shape(len(order), of_order[-1])):
            return min(found, key=lambda own: duration(own, lengths, num_ranks, cost))
        limit *= 2


def _runs(of_order: Sequence[int], cost: LengthCost, most_tokens: int, limit: float) -> list[tuple[int, int]]:
    """The runs of ascending lengths with the least sum of times, none of which is above ``limit``."""
    best = [0.0]
    starts = []
    for end, tokens in enumerate(of_order, 1):
        options, each = [], cost.sample(tokens)
        for sequences in range(1, end + 1):
            time = cost.fixed + sequences * each
            if sequences > 1 and (sequences * tokens > most_tokens or time > limit):
                break
            options.append((best[end - sequences] + time, sequences))
        total, sequences = min(options)
        best.append(total)
        starts.append(end - sequences)
    runs, end = [], len(of_order)
    while end:
        runs.append((starts[end - 1], end))
        end = starts[end - 1]
    return runs[::-1]
