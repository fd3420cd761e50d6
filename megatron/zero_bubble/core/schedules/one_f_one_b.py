"""1F1B, Megatron's default schedule: warm-up forwards, then one forward and one fused backward in turn.

rank 0 |F0 F1 F2 F3 ..................BW0-- F4 BW1-- F5 BW2-- F6 BW3-- F7 BW4-- ...BW5-- ...BW6-- ...BW7-- |
rank 1 |...F0 F1 F2 ............BW0-- F3 BW1-- F4 BW2-- F5 BW3-- F6 BW4-- F7 BW5-- ...BW6-- ...BW7-- ......|
rank 2 |......F0 F1 ......BW0-- F2 BW1-- F3 BW2-- F4 BW3-- F5 BW4-- F6 BW5-- F7 BW6-- ...BW7-- ............|
rank 3 |.........F0 BW0-- F1 BW1-- F2 BW2-- F3 BW3-- F4 BW4-- F5 BW5-- F6 BW6-- F7 BW7-- ..................|
"""

from dataclasses import replace

from megatron.zero_bubble.core.ir import Kind, Pass, Schedule
from megatron.zero_bubble.core.schedules.letters import forward_backward, linear
from megatron.zero_bubble.core.schedules.recipe import Recipe


def build(num_ranks: int, num_microbatches: int, _: int = 1, pairs: bool = False) -> Schedule:
    """Build 1F1B: rank i warms up with p-1-i forwards, so that a forward never delays its first backward.

    With ``pairs``, the F and BW of the steady state run at the same time. A message then takes a pair to pass a rank in
    either direction, so rank i warms up with 2(p-1-i)+1 forwards.
    """

    def warmup(rank: int) -> int:
        ahead = num_ranks - 1 - rank
        return min(2 * ahead + 1, num_microbatches) if pairs else ahead

    def row(rank: int) -> str:
        return forward_backward(num_microbatches, warmup(rank))

    schedule = linear(RECIPE.name, num_ranks, num_microbatches, row, backward=Kind.BW)
    together = (Pass(rank, Kind.F, m) for rank in range(num_ranks) for m in range(warmup(rank), num_microbatches))
    return replace(schedule, pairs=frozenset(together)) if pairs else schedule


RECIPE = Recipe(
    name="1f1b",
    summary="one forward, one fused backward; Megatron's default and the baseline",
    bubble="(p-1)(F+B+W)",
    memory="pM",
    build=build,
    has_pairs=True,
)
