"""What a layer of each kind takes, from what the layers of every stage take together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import fsum

_ROUNDS, _SETTLED = 500, 1e-9
"""Most rounds, and the relative change of a round that ends them."""


def of_kinds(amounts: Sequence[float], stages: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return what a layer of each kind takes.

    All layers begin with the mean of all. In each round, a kind is multiplied by how much more its stages take than
    their layers add up to, on average over its layers (Richardson 1972, Lucy 1974). So nothing becomes negative, kinds
    that no stage tells apart stay as they began, and layers of one kind take the mean at once.

    Args:
        amounts: what each stage takes, 0 or above.
        stages: the kinds of its layers, in any order.
    """
    counts = [Counter(stage) for stage in stages]
    layers = sum(counts, Counter[str]())
    of = dict.fromkeys(layers, fsum(amounts) / layers.total())
    for _ in range(_ROUNDS if len(layers) > 1 else 0):
        sums = [fsum(of[kind] * count for kind, count in stage.items()) for stage in counts]
        factors = [amount / whole if whole else 0.0 for amount, whole in zip(amounts, sums, strict=True)]
        by = {
            kind: fsum(stage[kind] * factor for stage, factor in zip(counts, factors, strict=True)) / layers[kind]
            for kind in of
        }
        of = {kind: own * by[kind] for kind, own in of.items()}
        if all(abs(factor - 1.0) < _SETTLED for factor in by.values()):
            break
    return of
