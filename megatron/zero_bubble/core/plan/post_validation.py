"""Insert the point at which an iteration validates the previous optimizer step, and the ops to stop there.

With post-validation (arXiv 2401.10241, section 4) the first forwards of an iteration run on weights that may have to be
rolled back. ``Validate`` precedes the first pass that cannot be repeated, because gradients must not be accumulated
over those that a repeated step needs. If validation rejects the step, every rank stops at its ``Validate``. These
positions must therefore be a consistent cut: no pass before one of them needs a pass after another. The ``drain``
completes and discards the messages that cross the cut, whether sent and not expected or expected and not sent, and the
collectives that only some ranks have started.
"""

from __future__ import annotations

from dataclasses import replace

from megatron.zero_bubble.core.analysis.period import validation_positions
from megatron.zero_bubble.core.ir import Message, Op, Plan, Recv, Send, Settle, Validate
from megatron.zero_bubble.core.ir.collectives import Collective
from megatron.zero_bubble.core.plan.unroll import alike


@alike
def with_validation(plan: Plan) -> Plan:
    """A lowering pass: add a ``Validate`` on every rank, at the latest valid position, and the ``drain``."""
    positions = validation_positions(plan)
    drain = _drain([(ops[:position], ops[position:]) for ops, position in zip(plan.ops, positions, strict=True)])
    rows = zip(plan.ops, positions, strict=True)
    return replace(plan, ops=tuple((*ops[:at], Validate(), *ops[at:]) for ops, at in rows), drain=drain)


def _drain(rows: list[tuple[tuple[Op, ...], tuple[Op, ...]]]) -> tuple[tuple[Op, ...], ...]:
    """The ops by which each rank starts the remaining collectives, and posts, then settles, the remaining messages.

    Args:
        rows: the ops of each rank before and after the position at which it stops.
    """
    begun = [before for before, _ in rows]
    started = {op.key for ops in begun for op in ops if isinstance(op, Collective)}
    sent, expected, settled = ([_messages(ops, kind) for ops in begun] for kind in (Send, Recv, Settle))
    missing_sends = [[m for row in expected for m in row if m.source == r and m not in sent[r]] for r in _ranks(begun)]
    missing_recvs = [[m for row in sent for m in row if m.target == r and m not in expected[r]] for r in _ranks(begun)]
    return tuple(
        (
            *(op for op in rows[rank][1] if isinstance(op, Collective) and op.key in started),
            *map(Recv, missing_recvs[rank]),
            *map(Send, missing_sends[rank]),
            *(Settle(m) for m in (*sent[rank], *missing_sends[rank]) if m not in settled[rank]),
        )
        for rank in _ranks(begun)
    )


def _ranks(begun: list[tuple[Op, ...]]) -> range:
    return range(len(begun))


def _messages(ops: tuple[Op, ...], kind: type[Send | Recv | Settle]) -> dict[Message, None]:
    """The messages of all ops of class ``kind``, in order, as a dict for fast look-up."""
    return {op.message: None for op in ops if isinstance(op, kind)}
