"""V-Half: half of 1F1B's memory and about half of its bubble (Controllable Memory, arXiv 2405.15362, section 4).

A building block on a V, repeated every six units of time: it takes two units per rank on the way down and one on the
way up, so that an activation is stored for half as long as in 1F1B.

rank 0 |0F0 0F1 ....3F0 3B0 0F2 3W0 3F1 3B1 0B0 3W1 0W0 3F2 0F3 3B2 0B1 3W2 0W1 3F3 3B3 3W3 0B2 0W2 0B3 0W3 |
rank 1 |....1F0 2F0 1F1 2F1 2B0 2W0 1B0 1W0 1F2 2F2 2B1 2W1 1B1 1W1 1F3 2F3 2B2 2W2 1B2 1W2 2B3 1B3 2W3 1W3 |
"""

from megatron.zero_bubble.core.ir import Schedule
from megatron.zero_bubble.core.schedules.recipe import Recipe
from megatron.zero_bubble.core.schedules.vee import equal_schedule
from megatron.zero_bubble.core.search.published import v_half


def build(num_ranks: int, num_microbatches: int, _: int = 2) -> Schedule:
    """Build the schedule for equal passes."""
    return equal_schedule(RECIPE.name, num_ranks, num_microbatches, v_half)


RECIPE = Recipe(
    name="v-half",
    summary="V placement: about half of 1F1B's memory and half of its bubble",
    bubble="~(p-2)(F+B+W)/2",
    memory="(p/2+1)M",
    build=build,
    shape="vee",
    adapts=True,
)
