"""1F1B, Megatron's default schedule: warm-up forwards, then one forward and one fused backward in turn.

rank 0 |F0 F1 F2 F3 ..................BW0-- F4 BW1-- F5 BW2-- F6 BW3-- F7 BW4-- ...BW5-- ...BW6-- ...BW7-- |
rank 1 |...F0 F1 F2 ............BW0-- F3 BW1-- F4 BW2-- F5 BW3-- F6 BW4-- F7 BW5-- ...BW6-- ...BW7-- ......|
rank 2 |......F0 F1 ......BW0-- F2 BW1-- F3 BW2-- F4 BW3-- F5 BW4-- F6 BW5-- F7 BW6-- ...BW7-- ............|
rank 3 |.........F0 BW0-- F1 BW1-- F2 BW2-- F3 BW3-- F4 BW4-- F5 BW5-- F6 BW6-- F7 BW7-- ..................|
"""

from megatron.zero_bubble.ir import Kind, Schedule
from megatron.zero_bubble.schedules.letters import forward_backward, linear
from megatron.zero_bubble.schedules.recipe import Recipe


def build(num_ranks: int, num_microbatches: int, _: int = 1) -> Schedule:
    """Build 1F1B: rank i warms up with p-1-i forwards, so that a forward never delays its first backward."""

    def row(rank: int) -> str:
        return forward_backward(num_microbatches, warmup=num_ranks - 1 - rank)

    return linear(RECIPE.name, num_ranks, num_microbatches, row, backward=Kind.BW)


RECIPE = Recipe(
    name="1f1b",
    summary="one forward, one fused backward; Megatron's default and the baseline",
    bubble="(p-1)(F+B+W)",
    memory="pM",
    build=build,
)
