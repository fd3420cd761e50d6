"""Schedules in the CSV form of torch.distributed.pipelining, so that both can run and check each other's.

A file has one line per rank and one cell per action, ``<stage><action><microbatch>``. torch writes I for our B (the
gradient of the input) and B for our BW (the whole backward); F and W are the same. Before torch 2.6, B was the gradient
of the input, and BW the whole backward; such files are refused. An empty cell is a wait. The lowered form also has
sends and receives, such as ``1SEND_F0``, and actions of sharded weights, such as ``1UNSHARD``.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import count

from megatron.zero_bubble.core.analysis.validate import validate
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Kind, Pass, Placement, Plan, Schedule
from megatron.zero_bubble.core.ir.ops import Op, Recv, Send, Settle
from megatron.zero_bubble.core.ir.sizes import check_size

_KINDS = {"F": Kind.F, "I": Kind.B, "W": Kind.W, "B": Kind.BW}
_ACTIONS = {kind: action for action, kind in _KINDS.items()}
_CELL = re.compile(r"([0-9]{1,9})(F|I|W|B)([0-9]{1,9})")
_NO_PASS = re.compile(r"[0-9]{1,9}(?:(?:SEND|RECV)_[FB]|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]{0,9}")
_OLDER = "in files of torch before 2.6, B is the gradient of the input, and BW the whole backward: write I and B"
_OVERLAP = "OVERLAP_F_B"
_PAIR = re.compile(rf"\(([^()]*)\){_OVERLAP}")


def schedule_from_csv(text: str, name: str) -> Schedule:
    """Read and validate a schedule in either form. Sends and receives are left out: they follow from the passes.

    Passes that torch overlaps, in one cell, are taken one after the other.

    Raises:
        UserError: a cell that is no action, a stage on several ranks, or, as ``ScheduleError`` with the grid, an
            invalid order.
    """
    try:
        rows = [tuple(_passes(cells, rank)) for rank, cells in enumerate(csv.reader(io.StringIO(text)))]
    except csv.Error as error:
        raise UserError(f"it must be CSV with one action in each cell; {error}; correct it") from None
    while rows and not rows[-1]:  # empty lines at the end
        rows.pop()
    rank_of: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for p in row:
            if rank_of.setdefault(p.stage, rank) != rank:
                raise UserError(
                    f"every stage must be on one rank; got {p} on rank {rank}, and stage {p.stage} on rank "
                    f"{rank_of[p.stage]} before; move it there"
                )
    first = next(stage for stage in count() if stage not in rank_of)
    if first < len(rank_of) or not rank_of:
        raise UserError(
            "it must have passes of every stage from 0 on, with one line per rank; got none of stage "
            f"{first}; write them as {first}F0, {first}I0, {first}W0 or {first}B0"
        )
    placement = Placement(tuple(rank_of[stage] for stage in range(len(rank_of))))
    num_microbatches = 1 + max(p.microbatch for row in rows for p in row)
    check_size(placement.num_ranks, num_microbatches, -(-placement.num_stages // placement.num_ranks))
    _check_letters(rows)
    schedule = Schedule(name, placement, num_microbatches, tuple(rows))
    validate(schedule)
    return schedule


def _check_letters(rows: Iterable[Sequence[Pass]]) -> None:
    """Reject a backward that has a B and a W, which is no order that newer versions of torch write."""
    backwards = {(p.kind, p.stage, p.microbatch) for row in rows for p in row}
    for kind, stage, microbatch in sorted(backwards, key=lambda each: each[1:]):
        if kind is Kind.BW and (Kind.W, stage, microbatch) in backwards:
            raise UserError(
                f"B is the whole backward, which leaves nothing for W; got {stage}B{microbatch} and "
                f"{stage}W{microbatch}; {_OLDER}"
            )


def schedule_to_csv(schedule: Schedule) -> str:
    """Write the passes of a schedule.

    Raises:
        UserError: slices, or passes of vocabulary parallelism, which torch does not have.
    """
    return _written(list(map(_cell, row)) for row in schedule.works)


def plan_to_csv(plan: Plan) -> str:
    """Write a plan in the lowered form: also its sends and receives, in their order.

    Raises:
        UserError: as ``schedule_to_csv``, or an op that torch does not have.
    """
    return _written([each for op in row for each in _lowered(op)] for row in plan.ops)


def _written(rows: Iterable[list[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _cell(works: Sequence[Pass]) -> str:
    actions = ";".join(map(_action, works))
    return f"({actions}){_OVERLAP}" if len(works) > 1 else actions


def _action(p: Pass) -> str:
    if p.kind not in _ACTIONS or p != Pass(p.stage, p.kind, p.microbatch):
        raise UserError(
            f"torch's CSV has passes of whole sequences and stages, F, B, W and BW; got {p}; write it with --format "
            "json, or plan without sequence slices and vocabulary parallelism"
        )
    return f"{p.stage}{_ACTIONS[p.kind]}{p.microbatch}"


def _lowered(op: Op) -> Iterator[str]:
    if op.works:
        yield _cell(op.works)
    elif isinstance(op, (Send, Recv)):
        producer, received = op.message.producer, isinstance(op, Recv)
        forward = producer.kind is Kind.F
        stage = producer.stage + (0 if not received else 1 if forward else -1)
        yield f"{stage}{'RECV' if received else 'SEND'}_{'F' if forward else 'B'}{producer.microbatch}"
    elif not isinstance(op, Settle):  # torch itself waits for its sends
        raise UserError(
            f"torch's CSV has passes, sends and receives; got {op}; write the plan with --format json, or plan without "
            "offloading, sharded weights and post-validation"
        )


def _passes(cells: Iterable[str], rank: int) -> Iterator[Pass]:
    for written in cells:
        cell = written.strip()
        pair = _PAIR.fullmatch(cell)
        for each in pair[1].split(";") if pair else [cell] if cell else []:
            match = _CELL.fullmatch(each.strip())
            if match is not None:
                yield Pass(int(match[1]), _KINDS[match[2]], int(match[3]))
            elif _NO_PASS.fullmatch(each.strip()) is None:
                raise UserError(
                    "a cell is <stage><action><microbatch> with torch's actions F, I, W and B, such as 2F0, or an "
                    f"action without a pass, such as 2SEND_F0 or 2UNSHARD; got {cell[:40]!r} on line {rank + 1}; "
                    f"correct it ({_OLDER})"
                )
