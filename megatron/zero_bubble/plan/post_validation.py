"""Where an iteration learns whether the optimizer step before it was right, and how it stops when it was not.

With post-validation (arXiv 2401.10241, section 4) the first forwards of an iteration run on weights that may have to be
taken back. ``Validate`` stands before the first pass that could not be done again: no gradient may be accumulated over
those that a repeated step needs. When the step was wrong, every rank stops at its ``Validate``. So these positions must
be a consistent cut: no pass before one needs a pass behind another. Messages that cross the cut, sent and not expected
or expected and not sent, are exchanged for nothing by the ``drain``.
"""

from __future__ import annotations

from dataclasses import replace

from megatron.zero_bubble.analysis.period import validation_positions
from megatron.zero_bubble.ir import Message, Op, Plan, Recv, Send, Settle, Validate


def with_validation(plan: Plan) -> Plan:
    """A lowering pass: ``plan`` with a ``Validate`` on every rank, as late as it may be, and with its ``drain``."""
    positions = validation_positions(plan)
    drain = _drain([ops[:position] for ops, position in zip(plan.ops, positions, strict=True)])
    rows = zip(plan.ops, positions, strict=True)
    return replace(plan, ops=tuple((*ops[:at], Validate(), *ops[at:]) for ops, at in rows), drain=drain)


def _drain(begun: list[tuple[Op, ...]]) -> tuple[tuple[Op, ...], ...]:
    """What each rank has to post, then to wait for, when all have stopped after ``begun``."""
    sent, expected, settled = ([_messages(ops, kind) for ops in begun] for kind in (Send, Recv, Settle))
    missing_sends = [[m for row in expected for m in row if m.source == r and m not in sent[r]] for r in _ranks(begun)]
    missing_recvs = [[m for row in sent for m in row if m.target == r and m not in expected[r]] for r in _ranks(begun)]
    return tuple(
        (
            *map(Recv, missing_recvs[rank]),
            *map(Send, missing_sends[rank]),
            *(Settle(m) for m in (*sent[rank], *missing_sends[rank]) if m not in settled[rank]),
        )
        for rank in _ranks(begun)
    )


def _ranks(begun: list[tuple[Op, ...]]) -> range:
    return range(len(begun))


def _messages(ops: tuple[Op, ...], kind: type[Send | Recv | Settle]) -> dict[Message, None]:
    """In their order; a dict to look up in."""
    return {op.message: None for op in ops if isinstance(op, kind)}
