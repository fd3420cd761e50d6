"""Build the schedules for equal passes: compact a known pattern without raising its peak memory."""

from __future__ import annotations

from megatron.zero_bubble.core.ir import Placement, Schedule
from megatron.zero_bubble.core.search.published import Published, equal_passes, on_equal_passes


def equal_schedule(
    name: str, num_ranks: int, num_microbatches: int, pattern: Published, on: Placement | None = None
) -> Schedule:
    """The schedule of ``search.published.equal_passes``, on a V unless another placement is given."""
    on = on or Placement.vee(num_ranks)
    return on_equal_passes(on, num_microbatches).schedule(name, equal_passes(on, num_microbatches, pattern))
