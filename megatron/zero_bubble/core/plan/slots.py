"""Slots: memory that the microbatches of a stage use one after the other.

A microbatch occupies a slot from its F until its W. Slots depend on what overlaps only: a plan for more microbatches,
or another plan, that needs no more of them runs in the memory, and with the captured passes, of the slots that exist.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron.zero_bubble.core.ir import Plan, Send, Settle
from megatron.zero_bubble.core.ir.passes import BW, B, F, W

Slots = Mapping[int, tuple[int, ...]]
"""For every stage of a rank, the slot of each microbatch."""

_OF_MICROBATCH = (F, B, W, BW)


def slots(plan: Plan, rank: int, until_settled: bool = False) -> Slots:
    """Give every microbatch on ``rank`` the first slot of its stage that is free: no assignment needs fewer.

    Args:
        until_settled: whether messages are sent from the memory of a slot, which is then occupied until they are
            settled.
    """
    begins: dict[tuple[int, int], int] = {}
    ends: dict[tuple[int, int], int] = {}
    for place, op in enumerate(plan.ops[rank]):
        works = (op.message.producer,) if until_settled and isinstance(op, (Send, Settle)) else op.works
        for work in works:
            if work.kind in _OF_MICROBATCH:
                begins.setdefault((work.stage, work.microbatch), place)
                ends[work.stage, work.microbatch] = place
    occupied: dict[int, list[int]] = {stage: [] for stage, _ in begins}  # until when, by slot
    assigned: dict[int, dict[int, int]] = {stage: {} for stage, _ in begins}
    for (stage, microbatch), begin in begins.items():
        until = occupied[stage]
        slot = next((slot for slot, end in enumerate(until) if end < begin), len(until))
        until[slot : slot + 1] = [ends[stage, microbatch]]
        assigned[stage][microbatch] = slot
    return {stage: tuple(of[microbatch] for microbatch in sorted(of)) for stage, of in assigned.items()}


def num_slots(of: Slots) -> int:
    """The number of slots of a rank, over all its stages."""
    return sum(max(numbers) + 1 for numbers in of.values())
