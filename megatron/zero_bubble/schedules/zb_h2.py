"""ZB-H2: no bubble at F = B = W, for about twice 1F1B's memory.

More forwards before the first backward fill the warm-up, and W lags B by 2i on rank i to fill the cool-down
(arXiv 2401.10241, section 3.2). The ranks neither start nor end together: without an optimizer that waits for all of
them there is no idle time left ("span"); with one, all wait for the last rank, which began (p-1)F late ("makespan").

rank 0 |F0 F1 F2 F3 F4 F5 F6 B0 W0 F7 B1 W1 B2 W2 B3 W3 B4 W4 B5 W5 B6 W6 B7 W7 .........|
rank 1 |...F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 W0 F7 B3 W1 B4 W2 B5 W3 B6 W4 B7 W5 W6 W7 ......|
rank 2 |......F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 W0 F7 B5 W1 B6 W2 B7 W3 W4 W5 W6 W7 ...|
rank 3 |.........F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 W0 F7 B7 W1 W2 W3 W4 W5 W6 W7 |
"""

from megatron.zero_bubble.ir import Schedule
from megatron.zero_bubble.schedules.letters import delay_wgrad, forward_backward, linear
from megatron.zero_bubble.schedules.recipe import Recipe


def build(num_ranks: int, num_microbatches: int, _: int = 1) -> Schedule:
    """Rank i warms up with 2(p-1-i) forwards; its W's start 2i backwards late."""

    def row(rank: int) -> str:
        return delay_wgrad(forward_backward(num_microbatches, warmup=2 * (num_ranks - 1 - rank)), lag=2 * rank)

    return linear(RECIPE.name, num_ranks, num_microbatches, row)


RECIPE = Recipe(
    name="zb-h2",
    summary="twice 1F1B's memory, no bubble when F = B = W",
    bubble="(p-1)(F+B-2W)",
    memory="(2p-1)M",
    build=build,
)
