"""Plans that a test writes as text."""

from __future__ import annotations

from collections.abc import Iterable

from megatron.zero_bubble.core.formats.plan import plan_from_json
from megatron.zero_bubble.core.ir import Op, Plan, Schedule
from megatron.zero_bubble.core.ir.offload import OFFLOAD_OPS
from megatron.zero_bubble.core.ir.ops import OPS, parse_op
from megatron.zero_bubble.core.ir.shards import SHARD_OPS


def plan_from_text(
    schedule: Schedule,
    rows: Iterable[Iterable[str]],
    ops: Iterable[type[Op]] = (*OPS, *OFFLOAD_OPS, *SHARD_OPS),
) -> Plan:
    """Read what ``Plan.to_text`` wrote; ``ops`` are the allowed classes of ops.

    Raises:
        UserError: for an op of any other class.
    """
    classes = tuple(ops)
    return Plan(schedule, tuple(tuple(parse_op(text, rank, classes) for text in row) for rank, row in enumerate(rows)))


def schedule_from_json(text: str) -> Schedule:
    """Read the schedule of a plan's JSON."""
    return plan_from_json(text).schedule
