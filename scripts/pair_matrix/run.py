"""Run rows on a pool of ranks, and judge them."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field

from megatron.zero_bubble.core.errors import UserError
from pair_matrix.compare import differences, promise_to_stock
from pair_matrix.jobs import AT_RUN, layout_of, modes_of, refusal
from pair_matrix.options import Row, text_of
from pair_matrix.train import Job, train
from tests.helpers.ranks import RankFailure, RankPool

TIMEOUT_S = 180.0
_SENTENCE = re.compile(rf"^{re.escape(UserError.__module__)}\.UserError: (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Verdict:
    """The result of a row.

    Attributes:
        row: the row as words ``option=value``.
        status: ``equal``; ``refused``, as a rule of ``jobs.RUN_RULES`` says; ``different``; or ``failed``, also for a
            refusal or a run that no rule expects.
        promise: how equal the schedule had to be to stock: ``bits``, ``model``, ``tolerance`` or ``none``.
        details: differences, the sentence of a refusal, or the report of all ranks of a failure.
    """

    row: str
    status: str
    seconds: float
    promise: str = ""
    details: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether the row is as promised."""
        return self.status in ("equal", "refused")


def run(row: Row, pool: RankPool) -> Verdict:
    """Run one row; a failure ends the processes of the pool, which starts new ones."""
    text, began = text_of(row), time.monotonic()
    reason = refusal(row) or ""
    at_run = reason.startswith(AT_RUN)
    if reason and not at_run:
        return Verdict(text, "failed", time.monotonic() - began, details=[reason])
    job = Job(modes_of(row), row["fault"], row["loop"] == "logits")
    try:
        results = pool.run(layout_of(row).num_ranks, train, job, timeout=TIMEOUT_S)
    except RankFailure as failure:
        sentence = _SENTENCE.search(str(failure))
        said = str(failure) if sentence is None else AT_RUN + sentence[1]
        status = "refused" if at_run and said.startswith(reason) else "failed"
        return Verdict(text, status, time.monotonic() - began, details=[said])
    if at_run:
        return Verdict(text, "failed", time.monotonic() - began, details=[f"it ran, although {reason}"])
    found = differences(row, results)
    kind = promise_to_stock(row, results).kind
    return Verdict(text, "different" if found else "equal", time.monotonic() - began, kind, found)
