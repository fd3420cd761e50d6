"""Pack samples into a number of microbatches with nearly equal times: one after the other, none attends to another."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from megatron.zero_bubble.core.costs.lengths import LengthCost, Load

Microbatches = tuple[tuple[int, ...], ...]
"""The samples of each microbatch of a replica."""

_SUM = itemgetter(0)


def load_of(microbatch: Sequence[int], lengths: Sequence[int]) -> Load:
    """The load of a microbatch of the given samples."""
    return Load.of(lengths[sample] for sample in microbatch)


def pack(
    samples: Sequence[int], lengths: Sequence[int], cost: LengthCost, most_tokens: int, number: int
) -> Microbatches | None:
    """Pack samples into a number of microbatches with nearly equal times; None if no such packing is found."""
    parts = karmarkar_karp([cost.sample(lengths[sample]) for sample in samples], number)
    found = [[samples[item] for item in part] for part in parts]
    if all(sum(lengths[sample] for sample in part) <= most_tokens for part in found):
        return tuple(map(tuple, found))
    return _within(samples, lengths, cost, most_tokens, number)


def _within(
    samples: Sequence[int], lengths: Sequence[int], cost: LengthCost, most_tokens: int, number: int
) -> Microbatches | None:
    """Put each sample, the longest first, where the time is the least among the microbatches that have room."""
    own: list[list[int]] = [[] for _ in range(number)]
    tokens, times = [0] * number, [0.0] * number
    for sample in sorted(samples, key=lambda sample: (-lengths[sample], sample)):
        room = [at for at in range(number) if tokens[at] + lengths[sample] <= most_tokens]
        if not room:
            return None
        at = min(room, key=lambda at: times[at])
        own[at].append(sample)
        tokens[at] += lengths[sample]
        times[at] += cost.sample(lengths[sample])
    return tuple(tuple(sorted(part)) for part in own) if all(own) else None


def karmarkar_karp(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Divide items into parts with nearly equal sums; with as many items as parts or more, no part is empty.

    Largest differencing: of all partial divisions, the two with the largest differences between their parts are merged,
    the larger parts of one with the smaller parts of the other.
    """
    # By partial division: minus its difference, its first item, and its parts that are not empty, the largest first.
    # A part is its sum, and its items as a tree of pairs.
    heap: list[tuple[float, int, list[tuple[float, Any]]]] = []
    for item, own in enumerate(costs):
        heap.append((-own if num_parts > 1 else 0.0, item, [(own, item)]))
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, item, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        shared = max(0, len(one) + len(other) - num_parts)
        alone = len(one) - shared
        both = [(a + b, (p, q)) for (a, p), (b, q) in zip(one[alone:], other[: -shared - 1 : -1], strict=True)]
        merged = one[:alone] + other[: len(other) - shared] + both
        merged.sort(key=_SUM, reverse=True)
        least = merged[-1][0] if len(merged) == num_parts else 0.0
        heapq.heappush(heap, (least - merged[0][0], item, merged))
    parts = [sorted(_items(tree)) for _, tree in heap[0][2]]
    return parts + [[] for _ in range(num_parts - len(parts))]


def _items(tree: Any) -> list[int]:
    """The leaves of a tree of pairs."""
    found, left = [], [tree]
    while left:
        node = left.pop()
        if isinstance(node, tuple):
            left += node
        else:
            found.append(node)
    return found
