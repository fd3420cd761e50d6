"""Plans whose middle part is repeated: it is lowered, proved and stored once, for any number of microbatches.

The stem of a plan is its lowering for fewer microbatches. Cuts divide its ops on every rank; between them are two
windows of equal ops, the second for later microbatches. By induction, any number of windows can be inserted there:

* The cuts are consistent: what comes before a cut waits for nothing that comes after it.
* Whatever the ops before the second cut leave for later ops (values and buffers on each rank, tokens, messages in
  transit in their order), those before the first cut leave as well, for earlier microbatches. So a window that can run
  after the one can run after the other.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

from megatron.zero_bubble.analysis.steps import Step, steps
from megatron.zero_bubble.ir import Compute, Plan, Recv, Schedule, Send
from megatron.zero_bubble.ir.ops import STEPPED
from megatron.zero_bubble.ir.passes import later
from megatron.zero_bubble.ir.repeats import Repeats
from megatron.zero_bubble.ir.unrolled import Cut, Unrolled


def unroll(stem: Plan, schedule: Schedule, repeats: Repeats, kept: int) -> Plan | None:
    """Insert the windows that are missing in ``stem``, the proved lowering of ``schedule`` with only ``kept`` windows.

    Returns None if the ops do not repeat as the passes do: the windows differ, have ops without a ``later``, or are not
    proved to run again.
    """
    positions = [[place for place, op in enumerate(row) if isinstance(op, Compute)] for row in stem.ops]
    computed = (tuple(op.work for op in row if isinstance(op, Compute)) for row in stem.ops)
    if tuple(computed) != stem.schedule.order:
        return None
    # The first windows may still release buffers of the warm-up; the last may already post receives of the cool-down.
    cuts = [
        tuple(
            found[begin + number * length]
            for found, begin, length in zip(positions, repeats.begins, repeats.lengths, strict=True)
        )
        for number in range(kept - 4, kept - 1)
    ]
    ops = Unrolled(stem, (cuts[0], cuts[1], cuts[2]), repeats.num_microbatches, repeats.copies - kept)
    repeated = _alike(ops) and can_repeat(ops, steps(stem))
    return replace(stem, schedule=schedule, ops=ops) if repeated else None


def _alike(ops: Unrolled) -> bool:
    """Whether the two windows are equal but for their microbatches, and every op from there on has a ``later``."""
    by = ops.num_microbatches
    rows = list(zip(ops.stem.ops, ops.stem.effects, *ops.cuts, strict=True))
    kinds = {type(op): op for row, _, begin, *_ in rows for op in row[begin:]}
    return all(op.later(by) is not None for op in kinds.values()) and all(
        tuple(op.later(by) for op in row[begin:middle]) == row[middle:end]
        and later(effects[begin:middle], by) == effects[middle:end]
        for row, effects, begin, middle, end in rows
    )


def can_repeat(ops: Unrolled, rows: Sequence[Sequence[Step]]) -> bool:
    """Whether the inserted windows can run, if the stem can; ``rows`` are the steps of the stem."""
    first, second = (_left(ops.stem, rows, cut) for cut in ops.cuts[:2])
    return first is not None and second == {later(left, ops.num_microbatches) for left in first}


def _left(plan: Plan, rows: Sequence[Sequence[Step]], cut: Cut) -> set[Hashable] | None:
    """Return what the ops before ``cut`` leave for those after it; None if they wait for something after it."""
    made = {token for row, at in zip(rows, cut, strict=True) for step in row[:at] for token in step.makes}
    waits = (token for row, at in zip(rows, cut, strict=True) for step in row[:at] for token in step.waits)
    if not made.issuperset(token for token in waits if token != STEPPED):
        return None
    left: set[Hashable] = set()
    for rank, (row, effects, at) in enumerate(zip(rows, plan.effects, cut, strict=True)):
        left.update(token for step in row[at:] for token in step.waits if token in made)
        held: set[Hashable] = set()
        for _, gives, takes, *_ in effects[:at]:
            held.update(gives)
            held.difference_update(takes)
        left.update(
            (rank, resource) for uses, _, takes, *_ in effects[at:] for resource in (*uses, *takes) if resource in held
        )
    return left.union(_in_transit(plan, cut))


def _in_transit(plan: Plan, cut: Cut) -> Iterator[Hashable]:
    """Yield, for every channel, which end is ahead at ``cut``, and its messages that the other end still lacks."""
    begun = replace(plan, ops=tuple(row[:at] for row, at in zip(plan.ops, cut, strict=True)))
    sent, posted = begun.messages(Send), begun.messages(Recv)
    for channel in sorted(sent.keys() | posted.keys()):
        sends, receives = sent.get(channel, []), posted.get(channel, [])
        ahead = max(sends, receives, key=len)
        yield channel, len(sends) > len(receives), tuple(ahead[min(len(sends), len(receives)) :])
