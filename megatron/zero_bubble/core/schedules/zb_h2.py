"""ZB-H2: no bubble if F = B = W, with about twice 1F1B's memory.

More forwards before the first backward fill the warm-up, and on rank i, W lags 2i microbatches behind B to fill the
cool-down (arXiv 2401.10241, section 3.2). The ranks neither start nor end together. If the optimizer does not wait for
all ranks, no idle time is left ("span"); if it does, all ranks wait for the last one, which starts (p-1)F later
("makespan").

rank 0 |F0 F1 F2 F3 F4 F5 F6 B0 W0 F7 B1 W1 B2 W2 B3 W3 B4 W4 B5 W5 B6 W6 B7 W7 .........|
rank 1 |...F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 W0 F7 B3 W1 B4 W2 B5 W3 B6 W4 B7 W5 W6 W7 ......|
rank 2 |......F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 W0 F7 B5 W1 B6 W2 B7 W3 W4 W5 W6 W7 ...|
rank 3 |.........F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 W0 F7 B7 W1 W2 W3 W4 W5 W6 W7 |
"""

from megatron.zero_bubble.core.ir import Schedule
from megatron.zero_bubble.core.schedules.letters import delay_wgrad, forward_backward, linear
from megatron.zero_bubble.core.schedules.recipe import Recipe


def build(num_ranks: int, num_microbatches: int, _: int = 1) -> Schedule:
    """Build ZB-H2: rank i warms up with 2(p-1-i) forwards, and its W passes lag 2i backwards behind."""

    def row(rank: int) -> str:
        return delay_wgrad(forward_backward(num_microbatches, warmup=2 * (num_ranks - 1 - rank)), lag=2 * rank)

    return linear(RECIPE.name, num_ranks, num_microbatches, row)


RECIPE = Recipe(
    name="zb-h2",
    summary="about twice 1F1B's memory; no bubble if F = B = W",
    bubble="(p-1)(F+B-2W)",
    memory="(2p-1)M",
    build=build,
)
