"""V-Min: a third of 1F1B's memory and two thirds of its bubble (Controllable Memory, arXiv 2405.15362, section 4).

A building block on a V, repeated every six units of time: it takes one unit per rank in both directions, which is the
shortest possible. If passes differ in length, every microbatch has waits.

rank 0 |0F0 0F1 ....3F0 3B0 0F2 3W0 3F1 0B0 3B1 0W0 3W1 0F3 0B1 3F2 3B2 0W1 3W2 0B2 3F3 3B3 0W2 3W3 0B3 0W3 |
rank 1 |....1F0 2F0 1F1 2F1 2B0 1B0 2W0 1W0 1F2 2B1 1B1 2F2 2W1 1W1 1F3 2B2 1B2 2F3 2W2 1W2 2B3 1B3 2W3 1W3 |
"""

from megatron.zero_bubble.core.ir import Schedule
from megatron.zero_bubble.core.schedules.recipe import Recipe
from megatron.zero_bubble.core.schedules.vee import equal_schedule
from megatron.zero_bubble.core.search.published import v_min


def build(num_ranks: int, num_microbatches: int, _: int = 2) -> Schedule:
    """Build the schedule for equal passes."""
    return equal_schedule(RECIPE.name, num_ranks, num_microbatches, v_min)


RECIPE = Recipe(
    name="v-min",
    summary="V placement: about a third of 1F1B's memory and two thirds of its bubble",
    bubble="~2(p-2)(F+B+W)/3",
    memory="(p+4)M/3",
    build=build,
    shape="vee",
    adapts=True,
)
