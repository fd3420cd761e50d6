"""Random costs per layer, and all layouts, for tests that compare a search with trying everything."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from random import Random

from megatron.zero_bubble import Placement
from megatron.zero_bubble.core.costs.layers import LayerCosts, LayerFigures


def all_layouts(placement: Placement, num_layers: int) -> Iterator[tuple[int, ...]]:
    """Yield every number of layers per stage, where only the first and the last stage may have none."""
    stages = placement.num_stages
    if stages == 1:
        yield (num_layers,)
        return
    # Borders between stages, among the layers with one more at each end: no two borders coincide.
    for borders in combinations(range(1, num_layers + 2), stages - 1):
        counts = [b - a for a, b in pairwise((0, *borders, num_layers + 2))]
        yield (counts[0] - 1, *counts[1:-1], counts[-1] - 1)


def random_layers(dice: Random, num_layers: int) -> LayerCosts:
    """Return one, two, or as many kinds of layers as there are, with an embedding and a loss of up to five layers."""

    def part(largest: float = 1.0) -> LayerFigures:
        f, b, w = (dice.uniform(0.2, 2.0) * largest for _ in range(3))
        activation = dice.uniform(0.5, 2.0) * largest
        return LayerFigures(f, b, w, activation, activation * dice.uniform(0.1, 1.0))

    kinds = [part() for _ in range(dice.choice((1, 2, num_layers)))]
    order = sorted(dice.choices(range(len(kinds)), k=num_layers)) if dice.random() < 0.5 else None
    chosen = [kinds[k] for k in order] if order else dice.choices(kinds, k=num_layers)
    return LayerCosts(tuple(chosen), part(0.2), part(dice.choice((0.5, 2.0, 5.0))), dice.choice((0.0, 0.3)))
