"""ZB-H1: 1F1B with the backward split, so that W fills the gaps.

The memory is that of 1F1B, and the bubble about a third of 1F1B's (arXiv 2401.10241, section 3.1). On rank i, W lags i
microbatches behind B, so that B reaches the previous rank as early as possible and W fills the cool-down.

rank 0 |F0 F1 F2 F3 .........B0 W0 F4 B1 W1 F5 B2 W2 F6 B3 W3 F7 B4 W4 B5 W5 B6 W6 B7 W7 |
rank 1 |...F0 F1 F2 ......B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 F6 B4 W3 F7 B5 W4 B6 W5 B7 W6 W7 |
rank 2 |......F0 F1 ...B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 B4 W2 F6 B5 W3 F7 B6 W4 B7 W5 W6 W7 |
rank 3 |.........F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 F6 B6 W3 F7 B7 W4 W5 W6 W7 |
"""

from megatron.zero_bubble.core.ir import Schedule
from megatron.zero_bubble.core.schedules.letters import delay_wgrad, forward_backward, linear
from megatron.zero_bubble.core.schedules.recipe import Recipe


def build(num_ranks: int, num_microbatches: int, _: int = 1) -> Schedule:
    """Build ZB-H1: rank i warms up with p-1-i forwards, and its W passes lag i backwards behind."""

    def row(rank: int) -> str:
        return delay_wgrad(forward_backward(num_microbatches, warmup=num_ranks - 1 - rank), lag=rank)

    return linear(RECIPE.name, num_ranks, num_microbatches, row)


RECIPE = Recipe(
    name="zb-h1",
    summary="1F1B's memory and about a third of its bubble: W fills the gaps",
    bubble="(p-1)(F+B-W)",
    memory="pM",
    build=build,
)
