"""The proof, before a job trains, of its plans for all numbers of microbatches that it will run."""

from __future__ import annotations

from collections.abc import Collection

from megatron.zero_bubble.core.errors import PlanError
from megatron.zero_bubble.core.ir import Plan
from megatron.zero_bubble.planning.feasibility import Feasibility
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig
from megatron.zero_bubble.planning.job.runnable import check_runnable
from megatron.zero_bubble.planning.source import ScheduleSource


def check_counts(
    config: ZeroBubbleConfig, source: ScheduleSource, num_ranks: int, counts: Collection[int], runs: Feasibility
) -> dict[int, Plan]:
    """Prove the plans of a job, and return them; with ``zb-auto``, those that it begins with.

    Args:
        counts: its numbers of microbatches. A plan that can run for one of them need not exist for another.
        runs: what its GPUs have for a plan.

    Raises:
        UserError: why one cannot run.
    """
    plans: dict[int, Plan] = {}
    for count in counts:
        schedule = source.make(count)
        check_runnable(schedule, num_ranks, count)
        try:
            plans[count] = runs.check(schedule, config.additions(source, num_ranks, schedule))
        except PlanError as error:
            if len(counts) == 1:
                raise
            refusal = f"with {count} microbatches, {error}"
            raise PlanError(refusal) from error
    return plans
