"""1F1B, what stock Megatron runs: warm-up forwards, then one forward, one fused backward.

"""

from megatron.zero_bubble.ir import Kind, Schedule
from megatron.zero_bubble.schedules.letters import forward_backward, linear
from megatron.zero_bubble.schedules.recipe import Recipe


def build(num_ranks: int, num_microbatches: int) -> Schedule:
    """Rank i warms up with p-1-i forwards, so that its first backward never waits behind a forward."""

    def row(rank: int) -> str:
        return forward_backward(num_microbatches, warmup=num_ranks - 1 - rank)

    return linear(RECIPE.name, num_ranks, num_microbatches, row, backward=Kind.BW)


RECIPE = Recipe(
    name="1f1b",
    summary="one forward, one fused backward; stock Megatron's order and the baseline",
    bubble="(p-1)(F+B+W)",
    memory="pM",
    build=build,
)
