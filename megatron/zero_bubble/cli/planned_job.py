"""A job as its dry run describes it: its plan, proved, and what it takes."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron.zero_bubble.cli.hardware import device_of, job_costs
from megatron.zero_bubble.cli.job_runs import ProvedPlans, batch_counts, check_job, job_runs
from megatron.zero_bubble.cli.job_schedule import job_answer, job_schedule
from megatron.zero_bubble.cli.links import bandwidth_to_replicas
from megatron.zero_bubble.cli.rank_groups import RankGroups, show
from megatron.zero_bubble.core.analysis.memory import host_peaks
from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.formats.layout import job_layers
from megatron.zero_bubble.core.ir import Plan, Schedule
from megatron.zero_bubble.core.plan import Additions, PostReceives, plan_without_messages
from megatron.zero_bubble.core.plan.timelines import timeline_of
from megatron.zero_bubble.planning.answer import Answer
from megatron.zero_bubble.planning.change import Need
from megatron.zero_bubble.planning.feasibility import Feasibility
from megatron.zero_bubble.planning.few import few
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig
from megatron.zero_bubble.planning.plans import message_memory, rank_memory
from megatron.zero_bubble.planning.setup import Given, Searched
from megatron.zero_bubble.planning.shards import costs_of_units

RankMemory = Sequence[tuple[float, float, float]]
"""Three numbers per pipeline rank: activations, messages, and weights with gradients and optimizer state."""


class PlannedJob(NamedTuple):
    """A job whose plans are proved.

    Attributes:
        layers: those of every stage.
        answer: what ``zb-auto`` plans; None for another schedule.
        timeline: with the copies of offloading, or the collectives of sharded units.
        host: host memory per rank, in the unit of the costs; None without offloading.
        proved: a sentence with what was proved.
    """

    layers: tuple[int, ...]
    groups: RankGroups
    costs: Figures
    answer: Answer | None
    timeline: Timeline
    memory: RankMemory
    host: tuple[float, ...] | None
    proved: str

    @property
    def need(self) -> Need:
        """Its memory, by kind."""
        return Need(*map(tuple, zip(*self.memory, strict=True)))


def planned_job(
    options: argparse.Namespace,
    args: argparse.Namespace,
    under_megatron: bool,
    environment: Mapping[str, str] = os.environ,
    by_few: bool = False,
) -> PlannedJob:
    """Plan and prove a job.

    Args:
        options: the flags that say where it runs, and what it costs there.
        args: its checked flags.
        under_megatron: whether Megatron-LM's script starts it.
        environment: of its processes.
        by_few: whether a schedule by name is proved, and its messages counted, with few microbatches that stand for
            many.

    Raises:
        UserError: the error that the run would stop with.
    """
    layers, groups = job_layers(args), RankGroups.of(args, options.nodes, options.gpus_per_node)
    _, costs, domains = job_costs(options, args, options.costs)
    runs = job_runs(args, options.gpu, under_megatron, environment)
    by_few = by_few and not isinstance(args.run.setup.order, (Given, Searched))
    proved = check_job(args, runs, by_few) if args.run.has_schedule else None
    made = job_answer(args, costs, costs.num_microbatches, runs)
    schedule = job_schedule(args, costs.num_ranks, costs.num_microbatches) if made is None else made.schedule
    config: ZeroBubbleConfig | None = None if args.source is None else args.zero_bubble
    added = Additions() if config is None else config.additions(args.source, costs.num_ranks, schedule)
    to_replicas = bandwidth_to_replicas(domains, device_of(options))
    costs = costs_of_units(costs, schedule, added, args.data_parallel_size, to_replicas)
    figures = costs.on(args.placement)
    receives: PostReceives = args.run.setup.messages.receives
    is_simulated = made is not None and made.is_plain and not added.ops and made.costs.on(args.placement) == figures
    timeline = made.timeline if made is not None and is_simulated else timeline_of(schedule, *figures, added)
    moves = config is not None and config.selection(args.source) is not None
    host = host_peaks(plan_without_messages(schedule, added), figures[1]) if moves else None
    if by_few:
        schedule = job_schedule(args, costs.num_ranks, few(costs.num_ranks, costs.num_microbatches))
    lowered = None if proved is None else proved.plans.get(schedule.num_microbatches)
    if lowered is not None and lowered.schedule != schedule:
        lowered = None
    memory = _memory(timeline, schedule, costs, receives, lowered)
    return PlannedJob(layers, groups, costs, made, timeline, memory, host, _what_is_proved(args, runs, proved))


def _what_is_proved(args: argparse.Namespace, runs: Feasibility, proved: ProvedPlans | None) -> str:
    if proved is None:
        return "The job uses Megatron's built-in schedule, which is not proved."
    counts, own = batch_counts(args), proved.counts
    listed = show(counts) if len(counts) < 3 else f"{counts[0]} to {counts[-1]}"
    where = f", with {runs.queues.what}" if runs.queues is not None and runs.queues.what else ""
    if len(own) < len(counts):
        where += f": {len(own)} of {len(counts)} batch sizes, evenly spread; the run proves all before it trains"
    return f"Proved free of deadlock for {listed} microbatches{where}."


def _memory(
    timeline: Timeline, schedule: Schedule, costs: Figures, post_receives: PostReceives, lowered: Plan | None
) -> RankMemory:
    """The memory of a plan; messages are those of ``schedule``, or of its plan if that is known."""
    messages = nothing = (0.0,) * costs.num_ranks
    if costs.in_bytes and costs.message_bytes:
        messages = message_memory(
            schedule, costs.message_bytes, post_receives, lowered, costs.widths_on(schedule.placement)
        )
    weights = costs.weights_on(schedule.placement) or nothing
    return list(zip(rank_memory(timeline, costs), messages, weights, strict=True))
