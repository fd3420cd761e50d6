"""ZB-H1: 1F1B's forwards and backwards, with W taken out of B and moved into the gaps.

The memory is 1F1B's and the bubble about a third of its (arXiv 2401.10241, section 3.1). W lags B by i on rank i, so
that B reaches the previous rank as early as it can and the cool-down is filled with W.

"""

from megatron.zero_bubble.ir import Schedule
from megatron.zero_bubble.schedules.letters import delay_wgrad, forward_backward, linear
from megatron.zero_bubble.schedules.recipe import Recipe


def build(num_ranks: int, num_microbatches: int) -> Schedule:
    """Rank i warms up with p-1-i forwards; its W's start i backwards late."""

    def row(rank: int) -> str:
        return delay_wgrad(forward_backward(num_microbatches, warmup=num_ranks - 1 - rank), lag=rank)

    return linear(RECIPE.name, num_ranks, num_microbatches, row)


RECIPE = Recipe(
    name="zb-h1",
    summary="1F1B's memory, a third of its bubble: W fills the gaps",
    bubble="(p-1)(F+B-W)",
    memory="pM",
    build=build,
)
