"""ZB-H2: no bubble at F = B = W, for about twice 1F1B's memory.

More forwards before the first backward fill the warm-up, and W lags B by 2i on rank i to fill the cool-down
(arXiv 2401.10241, section 3.2). The ranks neither start nor end together: without an optimizer that waits for all of
them there is no idle time left ("span"), with one the parallelogram costs (p-1)(F+B-2W)+(p-1)F ("makespan").

"""

from megatron.zero_bubble.ir import Schedule
from megatron.zero_bubble.schedules.letters import delay_wgrad, forward_backward, linear
from megatron.zero_bubble.schedules.recipe import Recipe


def build(num_ranks: int, num_microbatches: int) -> Schedule:
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
