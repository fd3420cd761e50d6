"""A plan that one rank is ready to run, and what the rank must know about it in every iteration."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron.zero_bubble.core.analysis.period import break_even
from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.analysis.validate import validate
from megatron.zero_bubble.core.costs.even import even_costs
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Plan, Schedule
from megatron.zero_bubble.core.ir.queues import HardwareQueues
from megatron.zero_bubble.core.plan import (
    Additions,
    LoweringPass,
    PostReceives,
    Slots,
    plan_of,
    plan_of_evaluation,
    prove_for_queues,
    slots,
)
from megatron.zero_bubble.engine.runtime.backends import queues_of_job
from megatron.zero_bubble.engine.runtime.groups import backend_of, torchs
from megatron.zero_bubble.integration.adapter.stage import StageFacts
from megatron.zero_bubble.integration.adapter.staging import steps_of
from megatron.zero_bubble.integration.adapter.vocabulary.facts import VocabularyFacts
from megatron.zero_bubble.planning.job.settled import settle_options
from megatron.zero_bubble.planning.run_options import RunOptions
from megatron.zero_bubble.planning.setup import Setup


@dataclass(frozen=True)
class Lowering:
    """What a part adds to a plan.

    Attributes:
        run: adds the ops.
        what: determines what ``run`` adds, for example which values move. If it changes, a new plan is made.
    """

    run: LoweringPass = field(compare=False)
    what: Collection[Hashable]


@dataclass(frozen=True)
class PreparedPlan:
    """A plan, and the facts about it that one rank needs in every iteration.

    Attributes:
        schedule: that the plan was made of.
        lowerings: what parts have added to the plan.
        forward_only: whether the plan is that of an evaluation.
    """

    schedule: Schedule
    lowerings: tuple[Lowering, ...]
    plan: Plan
    rank: int
    forward_only: bool

    @cached_property
    def stages(self) -> tuple[StageFacts, ...]:
        """The facts about the stages of the rank."""
        return tuple(StageFacts.of(self.plan.schedule, stage) for stage in self.schedule.placement.stages_of(self.rank))

    @cached_property
    def slots(self) -> Slots:
        """The slots of the microbatches on the rank."""
        return slots(self.plan, self.rank)

    @cached_property
    def vocabulary(self) -> VocabularyFacts | None:
        """The facts about the passes of the vocabulary; None without them."""
        return VocabularyFacts.of(self.plan.schedule, self.rank)

    @cached_property
    def break_even(self) -> float:
        """See ``PostValidatedOptimizer.break_even``; the same on all ranks, so with passes of equal length."""
        if not self.plan.drain:  # a plan without a drain validates nothing
            return 0.0
        return break_even(simulate(self.plan.schedule, even_costs(self.plan.schedule.placement)))

    @cached_property
    def steps(self) -> frozenset[Hashable]:
        """See ``staging.steps_of``."""
        of_parts = {step for lowering in self.lowerings for step in lowering.what}
        return steps_of(self.plan, self.forward_only, of_parts)

    @property
    def last_stage_rank(self) -> int:
        return loss_rank(self.schedule)

    @property
    def has_last_stage(self) -> bool:
        return self.last_stage_rank == self.rank


def lowered(
    schedule: Schedule,
    lowerings: Sequence[Lowering],
    forward_only: bool,
    post_receives: PostReceives,
    post_validation: bool,
) -> Plan:
    """Validate a schedule and lower it to a plan of training, or of an evaluation."""
    validate(schedule)
    of_parts = tuple(lowering.run for lowering in lowerings)
    added = Additions(post_receives, post_validation, more=of_parts)
    return plan_of_evaluation(schedule, added) if forward_only else plan_of(schedule, added)


def as_scheduled(setup: Setup, schedule: Schedule) -> Setup:
    """A setup with what a schedule decides."""
    return setup.running(Setup.of(schedule))


def check_model(
    chunks: Sequence[torch.nn.Module], setup: Setup, schedule: Schedule, say: Callable[[str], None] | None
) -> None:
    """Settle the options of a model, and of its data parallelism if it has any, for a schedule.

    Args:
        say: prints one line per option that was on and is off.

    Raises:
        UserError: an unsupported option; the rule, the value and the remedy.
    """
    wrapped = {id(chunk.ddp_config): chunk.ddp_config for chunk in chunks if hasattr(chunk, "ddp_config")}
    parts = [get_model_config(chunks[0]), *wrapped.values()]
    _settle(parts, as_scheduled(setup, schedule), say)


def check_stepping(config: Any, optimizer: Any, setup: Setup, say: Callable[[str], None] | None) -> None:
    """Settle the options of a model and of its optimizer for a setup, before its schedule is known.

    Raises:
        UserError: as ``check_model``.
    """
    overlaps = bool(getattr(config, "overlap_moe_expert_parallel_comm", False))
    _settle([config, optimizer], replace(setup, pairs=overlaps), say)


def _settle(parts: Sequence[Any], setup: Setup, say: Callable[[str], None] | None) -> None:
    for line in settle_options(parts, RunOptions(setup)):
        if say is not None:
            say(line)


def loss_rank(schedule: Schedule) -> int:
    (last,) = schedule.flow.sinks
    return schedule.placement.stage_to_rank[last]


def check_same_plan(plan: Plan, group: dist.ProcessGroup, who: str) -> None:
    """Check that all ranks of ``group`` have the same plan. A collective call.

    Raises:
        UserError: the plans differ; ``who`` names the ranks.
    """
    digests: list[Any] = [None] * group.size()
    dist.all_gather_object(digests, plan.digest, group=torchs(group))
    if len(set(digests)) > 1:
        raise UserError(
            f"all {who} must run the same plan; their fingerprints are {digests}; start every rank with the same "
            "schedule, batch sizes, files of schedules and costs, and version"
        )


def queues_of(group: dist.ProcessGroup) -> HardwareQueues | None:
    """The hardware queues of the GPUs of a pipeline; None if its messages do not go over NCCL."""
    return queues_of_job(backend_of(group), _divides_layers())


def _divides_layers() -> bool:
    """Whether tensor or context parallelism divides the layers of this rank's model."""
    of = parallel_state.get_tensor_model_parallel_group, parallel_state.get_context_parallel_group
    groups = (get(check_initialized=False) for get in of)
    return any(group is not None and group.size() > 1 for group in groups)


def check_queues(group: dist.ProcessGroup, plan: Plan) -> None:
    """Raise PlanError if ranks could block each other because streams of a GPU share hardware queues."""
    if (queues := queues_of(group)) is not None:
        prove_for_queues(plan, queues.number, queues.setting, queues.several)
