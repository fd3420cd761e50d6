"""Build the published V schedules: compact a known pattern without raising its peak memory."""

from __future__ import annotations

from megatron.zero_bubble.ir import Schedule
from megatron.zero_bubble.search.published import Pattern, equal_passes, on_equal_passes


def equal_schedule(name: str, num_ranks: int, num_microbatches: int, pattern: Pattern) -> Schedule:
    """The schedule of ``search.published.equal_passes``."""
    rows = equal_passes(num_ranks, num_microbatches, pattern)
    return on_equal_passes(num_ranks, num_microbatches).schedule(name, rows)
