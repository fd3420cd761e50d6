"""The options of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from megatron.zero_bubble.core.plan import PostReceives
from megatron.zero_bubble.core.plan.nccl import Ctas
from megatron.zero_bubble.engine.optimizer.rollback import Optimizers, Rollback
from megatron.zero_bubble.planning.rule import Choices


@dataclass(frozen=True)
class Options:
    """Options of a pipeline.

    Attributes:
        timeout: how long another rank may take; None for the job's.
        post_receives, ctas, recompute_logits: see ``ZeroBubbleConfig``.
        rollback: makes what undoes rejected optimizer steps, which the passes then validate, so that ``post_validated``
            must be called; None if steps are final.
        choices: what the configuration chooses, for refusals.
    """

    timeout: timedelta | None = None
    post_receives: PostReceives = "early"
    ctas: Ctas = field(default_factory=Ctas)
    recompute_logits: bool = False
    rollback: Callable[[Optimizers], Rollback] | None = None
    choices: Choices = field(default_factory=dict)
