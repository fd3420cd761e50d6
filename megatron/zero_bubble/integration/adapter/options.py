"""The options of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from megatron.zero_bubble.engine.optimizer.rollback import Optimizers, Rollback
from megatron.zero_bubble.planning.setup import Setup


@dataclass(frozen=True)
class Options:
    """Options of a pipeline.

    Attributes:
        timeout: how long another rank may take; None for the job's.
        setup: what the job runs.
        rollback: makes what undoes rejected optimizer steps, which the passes then validate, so that ``post_validated``
            must be called; None if steps are final.
        is_settled: whether the schedule stays for now; not while its first plan is still to come.
    """

    timeout: timedelta | None = None
    setup: Setup = field(default_factory=Setup)
    rollback: Callable[[Optimizers], Rollback] | None = None
    is_settled: Callable[[], bool] = lambda: True
