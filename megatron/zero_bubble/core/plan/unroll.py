"""Plans whose middle part is repeated: it is lowered, proved and stored once, for any number of microbatches.

The stem of a plan is its lowering for fewer microbatches. Cuts divide its ops on every rank; between them are two
windows of equal ops, the second for later microbatches. By induction, any number of windows can be inserted there:

* The cuts are consistent: what comes before a cut waits for nothing that comes after it.
* Whatever the ops before the second cut leave for later ops (values and buffers on each rank, tokens, messages in
  transit and collectives in their order), those before the first cut leave as well, for earlier microbatches. So a
  window that can run after the one can run after the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from megatron.zero_bubble.core.analysis.steps import Blocked, Step, advance
from megatron.zero_bubble.core.ir import Plan, Recv, Schedule, Send
from megatron.zero_bubble.core.ir.collectives import Collective
from megatron.zero_bubble.core.ir.ops import STEPPED, Rows, messages
from megatron.zero_bubble.core.ir.passes import later
from megatron.zero_bubble.core.ir.plan import Cut, Unrolled
from megatron.zero_bubble.core.ir.repeats import Repeats

_Lowering = TypeVar("_Lowering", bound=Callable[..., Plan])


def alike(lowering_pass: _Lowering) -> _Lowering:
    """Declare that a lowering pass treats all microbatches alike: the ops that it adds to a window of repeated passes
    are those that it adds to the next window, for later microbatches. Used as a decorator.
    """
    lowering_pass.alike = True  # type: ignore[attr-defined]
    return lowering_pass


def is_alike(lowering_pass: object) -> bool:
    """Whether a lowering pass, or the one that a ``functools.partial`` calls, is declared ``alike``."""
    return bool(getattr(getattr(lowering_pass, "func", lowering_pass), "alike", False))


def unroll(stem: Plan, schedule: Schedule, repeats: Repeats, kept: int) -> Plan | None:
    """Insert the windows that are missing in ``stem``, the lowering of ``schedule`` with only ``kept`` windows.

    Returns None if the ops do not repeat as the passes do: the windows differ, or have ops without a ``later``. The
    result is not proved yet.
    """
    positions = [[place for place, op in enumerate(row) for _ in op.works] for row in stem.ops]
    computed = (tuple(work for op in row for work in op.works) for row in stem.ops)
    if tuple(computed) != stem.schedule.order:
        return None
    # Before, windows may release buffers by messages of a warm-up; the last may already post receives of the cool-down.
    cuts = [
        tuple(
            found[begin + number * length]
            for found, begin, length in zip(positions, repeats.begins, repeats.lengths, strict=True)
        )
        for number in range(kept - 4, kept - 1)
    ]
    ops = Unrolled(stem, (cuts[0], cuts[1], cuts[2]), repeats.num_microbatches, repeats.copies - kept)
    return replace(stem, schedule=schedule, ops=ops) if _alike(ops) else None


def _alike(ops: Unrolled) -> bool:
    """Whether the two windows are equal but for their microbatches, and every op from there on has a ``later``."""
    by, flow = ops.num_microbatches, ops.stem.schedule.flow
    rows = list(zip(ops.stem.ops, *ops.cuts, strict=True))
    kinds = {type(op): op for row, begin, *_ in rows for op in row[begin:]}
    return all(op.later(by) is not None for op in kinds.values()) and all(
        end - begin == next_end - end
        and all(
            op.later(by) == next_op and later(op.effects(flow), by) == next_op.effects(flow)
            for op, next_op in zip(row[begin:end], row[end:next_end], strict=True)
        )
        for row, begin, end, next_end in rows
    )


def can_repeat(ops: Unrolled, rows: Sequence[Sequence[Step]]) -> bool:
    """Whether the inserted windows can run, if the stem can; ``rows`` are the steps of the stem."""
    made: set[Hashable] = {STEPPED}
    begin, lefts = (0,) * len(rows), []
    for cut in ops.cuts[:2]:
        try:
            for _, _, step in advance([row[a:b] for row, a, b in zip(rows, begin, cut, strict=True)], made):
                made.update(step.makes)
        except Blocked:
            return False  # the cut is not consistent
        tokens = (token for row, at in zip(rows, cut, strict=True) for step in row[at:] for token in step.waits)
        begun = tuple(row[:at] for row, at in zip(ops.stem.ops, cut, strict=True))
        lefts.append(
            {*made.intersection(tokens), *_held(ops.stem, rows, cut), *_in_transit(begun), *_begun_by_some(begun)}
        )
        begin = cut
    return lefts[1] == {later(item, ops.num_microbatches) for item in lefts[0]}


def _held(plan: Plan, rows: Sequence[Sequence[Step]], cut: Cut) -> Iterator[Hashable]:
    """Yield the rank and name of every value and buffer that an op before ``cut`` gives and one after it needs."""
    flow = plan.schedule.flow
    for rank, (row, at) in enumerate(zip(rows, cut, strict=True)):
        for step in row[at:]:
            for giver in step.after:
                if giver < at:
                    needs = step.op.effects(flow)
                    for resource in row[giver].op.effects(flow).gives:
                        if resource in needs.uses or resource in needs.takes:
                            yield rank, resource


def _in_transit(begun: Rows) -> Iterator[Hashable]:
    """Yield, for every channel, which end is ahead, and its messages that the other end still lacks."""
    sent, posted = messages(Send, begun), messages(Recv, begun)
    for channel in sorted(sent.keys() | posted.keys()):
        yield channel, *_ahead(sent.get(channel, []), posted.get(channel, []))


def _begun_by_some(begun: Rows) -> Iterator[Hashable]:
    """Yield, for every kind of collectives and every rank, whether it is ahead of rank 0, and by which of them."""
    orders: list[defaultdict[str, list[Hashable]]] = [defaultdict(list) for _ in begun]
    for order, row in zip(orders, begun, strict=True):
        for op in row:
            if isinstance(op, Collective):
                order[op.lane].append(op.key)
    for kind in sorted({kind for order in orders for kind in order}):
        for rank, order in enumerate(orders):
            yield kind, rank, *_ahead(order[kind], orders[0][kind])


def _ahead(one: Sequence[Hashable], other: Sequence[Hashable]) -> tuple[bool, tuple[Hashable, ...]]:
    """Whether ``one`` is longer, and what the longer one has in addition."""
    longer, shorter = (one, other) if len(one) > len(other) else (other, one)
    return longer is one, tuple(longer[len(shorter) :])
