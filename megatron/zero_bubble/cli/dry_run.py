"""``zero-bubble dry-run``: check and describe a training job before any node is allocated.

The flags of the job go through the parser and the checks of the training run, and its schedule through the same proofs
as in a run. No process is started, and neither torch nor a GPU is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from megatron.zero_bubble.analysis.memory import host_peaks
from megatron.zero_bubble.analysis.simulate import simulate
from megatron.zero_bubble.analysis.timeline import Metric, Timeline
from megatron.zero_bubble.analysis.validate import validate
from megatron.zero_bubble.cli.advice_text import not_read
from megatron.zero_bubble.cli.deciding import decided
from megatron.zero_bubble.cli.job_figures import gpu_bytes, job_figures, with_vocabulary
from megatron.zero_bubble.cli.job_schedule import job_schedule
from megatron.zero_bubble.cli.job_words import job_words
from megatron.zero_bubble.cli.links import add_link_flags, given_links, links_of, with_transfers
from megatron.zero_bubble.cli.megatron_job import MegatronJob, checked_megatron_job
from megatron.zero_bubble.cli.progress import working
from megatron.zero_bubble.cli.rank_groups import RankGroups, checked_world_size, show
from megatron.zero_bubble.cli.stock import against_stock
from megatron.zero_bubble.costs.estimate import DEVICES
from megatron.zero_bubble.costs.units import parse_bytes
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.formats.layout import job_layers, job_predictions
from megatron.zero_bubble.ir import Placement, Plan, Schedule
from megatron.zero_bubble.ir.vocabulary import algorithm_of
from megatron.zero_bubble.job import experts, recomputation
from megatron.zero_bubble.job.config import ZeroBubbleConfig
from megatron.zero_bubble.job.facts import remarks as of_other_jobs
from megatron.zero_bubble.job.flags import has_schedule
from megatron.zero_bubble.job.installed import missing_packages as packages_of_megatrons
from megatron.zero_bubble.job.pattern import contents
from megatron.zero_bubble.job.runnable import check_runnable
from megatron.zero_bubble.plan import PostReceives, lower_forward_only, lower_training, prove_for_queues
from megatron.zero_bubble.plan.nccl import collective_ctas
from megatron.zero_bubble.plan.offload import MoveSelection
from megatron.zero_bubble.plan.timelines import timeline_of
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.plans import message_memory, rank_memory, slower_than_1f1b
from megatron.zero_bubble.planning.shards import of_schedule
from megatron.zero_bubble.planning.source import ZB_AUTO
from megatron.zero_bubble.render.text import headline, imbalance
from megatron.zero_bubble.runtime.backends import hardware_queues, is_nccl
from megatron.zero_bubble.training.model_checks import missing_packages as packages_of_ours

_COPIES = "Copies to host memory and back are not in the times, unless the costs file has host_ms."
_BALANCE = (
    "another --pipeline-model-parallel-layout (zero-bubble plan --layout auto finds one) or "
    "--zero-bubble-vocabulary-parallel may balance the ranks"
)
_COLLECTIVES = "Gathers and reductions are not in the times, unless the costs file has gather_ms and reduce_ms."
_NODE = "@node@"
_MULTIPROCESSORS = {"a100": 108, "h100": 132, "h200": 132, "b200": 148}
"""Of each GPU that can be estimated for."""
_GIB = 2**30
_MOST_PROVED = 8
"""Batch sizes of a ramp that a dry run proves."""


def add_dry_run(verb: argparse.ArgumentParser) -> None:
    """Add the flags of ``dry-run``; the flags of the job follow after ``--``."""
    verb.usage = "%(prog)s [OPTION ...] -- FLAGS"
    verb.description = (
        "Check a training job without starting it, and print its rank layout, plan and memory. If the run would "
        "reject the job, print the same error and exit with code 2."
    )
    verb.add_argument("--nodes", type=int, default=1, metavar="N", help="number of nodes (default: 1)")
    verb.add_argument(
        "--gpus-per-node", type=int, default=8, metavar="G", help="GPUs per node, one process each (default: 8)"
    )
    verb.add_argument("--gpu", choices=tuple(DEVICES), default="a100", help="GPU to estimate for (default: a100)")
    verb.add_argument(
        "--gpu-memory", metavar="SIZE", help="end with exit code 2 if a rank needs more memory than this, e.g. 80GiB"
    )
    verb.add_argument(
        "--costs", metavar="FILE", help="measured pass times and memory (costs file), instead of estimates"
    )
    add_link_flags(verb)
    verb.add_argument(
        "--megatron-lm", action="store_true", help="the flags are for Megatron-LM's training script, not for ours"
    )
    verb.add_argument(
        "--launch-command",
        metavar="TEXT",
        help=f"command to print for each node, with {_NODE} replaced by the node's number, e.g. 'torchrun "
        f"--node-rank {_NODE} ...'; scripts/launch_torchrun.sh --dry-run gives it",
    )
    verb.add_argument(
        "job",
        nargs=argparse.REMAINDER,
        metavar="-- FLAGS",
        help="flags of the training script, after all options and a separate --",
    )
    verb.set_defaults(command=dry_run)


@working("checking the job and its plan")
def dry_run(options: argparse.Namespace) -> str:
    """Make the whole report.

    Raises:
        UserError: the error that the run would stop with, or a rank that needs more than ``--gpu-memory``.
    """
    checked_world_size(options.nodes, options.gpus_per_node)
    args, unread, replaced = _checked_job(options)
    layers = job_layers(args)
    groups = RankGroups.of(args, options.nodes, options.gpus_per_node)
    costs = job_figures(args, layers, options.gpu, options.costs, links_of(options, options.gpus_per_node))
    estimated = options.costs is None and costs.on(args.placement)[0].comm_ms > 0
    costs = with_transfers(costs, groups, options.gpu, given_links(options), estimated)
    costs = with_vocabulary(costs, args)
    schedule = job_schedule(args, costs, costs.num_microbatches)
    proved = _prove(args, costs, options.gpu)
    select = _selection(args)
    plan = None if select is None else lower_training(schedule, moves=select(schedule))
    if args.zero_bubble_shard_weights:
        costs, plan = _sharded(args, costs, schedule)
    figures = costs.on(args.placement)
    receives: PostReceives = args.zero_bubble.post_receives if has_schedule(args) else "early"
    timeline = timeline_of(schedule, *figures) if plan is None else simulate(plan, *figures)
    host = None if select is None or plan is None else host_peaks(plan, costs.on(args.placement)[1])
    memory = _memory(timeline, costs, receives)
    if options.gpu_memory is not None:
        _check_memory(options.gpu_memory, memory, costs)
    if host is not None and args.zero_bubble_host_memory is not None:
        _check_host_memory(args.zero_bubble_host_memory, host, costs)
    copied = None if host is None else _COPIES
    recomputed = recomputation.remark(args, args.source, costs.num_microbatches)
    hidden = experts.remark(args, args.source)
    uneven = None if (found := imbalance(timeline)) is None else f"{found}: {_BALANCE}"
    facts = {name: value for name, value in costs.facts.items() if name != "gpu"}  # which is assumed
    of_files = of_other_jobs(args.zero_bubble, lambda: facts) if has_schedule(args) else ()
    remarks = filter(None, (*_compared(options, args, timeline, costs), uneven, copied, recomputed, hidden, *of_files))
    missing = (packages_of_megatrons if options.megatron_lm else packages_of_ours)(args)
    needed = (f"The job also needs {package}, which is not installed here." for package in missing)
    notes = (*(f"{line}." for line in replaced), *costs.notes, *remarks, *needed)
    sections = [
        groups.text() + groups.warning(),
        _ranks_text(groups, stage_names(contents(args, layers), job_predictions(args)), timeline, costs, memory, host),
        "" if host is None else _nodes_text(groups, timeline, costs, host),
        "".join(f"{line}\n" for line in (headline(timeline), proved, *notes)),
        _commands(options),
    ]
    if unread:
        sections.insert(-1, "".join(f"{line}\n" for line in not_read(unread)))
    return "\n".join(section for section in sections if section)


def _compared(
    options: argparse.Namespace, args: argparse.Namespace, timeline: Timeline, costs: Figures
) -> tuple[str | None, ...]:
    """Return sentences on Megatron's own schedule and on 1F1B, if these can be compared with the job's."""
    if not has_schedule(args) or args.zero_bubble_shard_weights or algorithm_of(timeline.schedule) is not None:
        return ()
    objective: Metric = "span" if args.zero_bubble_post_validation else "makespan"
    compared = against_stock(options, job_words(options), costs, timeline, objective)
    return compared, slower_than_1f1b(timeline, costs, objective)


def _checked_job(options: argparse.Namespace) -> MegatronJob:
    """Parse and check the job's flags as the run does."""
    from megatron.zero_bubble.training.arguments import expanded, parse
    from megatron.zero_bubble.training.checks import check

    world_size = options.nodes * options.gpus_per_node
    job = job_words(options)
    ranks = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(options.gpus_per_node),
        "RANK": "-1",
    }  # writes nothing
    decision, decisions = decided(job if options.megatron_lm else expanded(job), ranks)
    job = decision if decisions else job
    if options.megatron_lm:
        read = checked_megatron_job(job, world_size, options.gpus_per_node)
        return read._replace(replaced=(*read.replaced, *decisions))
    args = parse(job)
    check(args, world_size, options.gpus_per_node)
    if args.zero_bubble_balance_microbatches:
        raise UserError(
            "a dry run needs the number of microbatches of an iteration, which depends on the documents with "
            "--zero-bubble-balance-microbatches; drop the flag, to check the job with microbatches of full length"
        )
    return MegatronJob(args, (), tuple(decisions))


def _sharded(args: argparse.Namespace, costs: Figures, schedule: Schedule) -> tuple[Figures, Plan]:
    """Return the figures with the memory that sharded units take, and the plan with their ops."""
    sharding, replicas = args.zero_bubble.sharding(costs.num_ranks), args.data_parallel_size
    plan = lower_training(schedule, sharding=sharding)
    units = of_schedule(costs, schedule, sharding, replicas)
    sent = "" if units.traffic is None else f", {max(units.traffic) / _GIB:.3g} GiB sent to {replicas - 1} replicas"
    note = f"Sharded units, {sharding.open_chunks} whole stages per rank: {max(units.gathers)} gathers and "
    note += f"{max(units.reductions)} reductions per rank and iteration{sent}."
    notes = (note, *(() if units.lane_ms else (_COLLECTIVES,)))
    static = units.static
    weights = None if static is None else lambda _: static
    return replace(costs, notes=(*costs.notes, *notes), weight_bytes=weights), plan


def _selection(args: argparse.Namespace) -> MoveSelection | None:
    return None if args.source is None else args.zero_bubble.selection(args.source)


def _prove(args: argparse.Namespace, costs: Figures, gpu: str) -> str:
    """Prove the plans as the run does, for every batch size of the job, and return a sentence with what was proved."""
    if not has_schedule(args):
        return "The job uses Megatron's built-in schedule, which is not proved."
    config: ZeroBubbleConfig = args.zero_bubble
    select = _selection(args)
    queues = hardware_queues() if _uses_nccl(args) else None
    batches = args.batch_sizes
    counts = sorted({size // batches.granule for size in batches.steps})
    if args.zero_bubble_schedule == ZB_AUTO:
        counts = counts[-1:]  # the run plans smaller batches when it reaches them
    proved = _spread(counts)
    for count in proved:
        schedule = job_schedule(args, costs, count)
        check_runnable(schedule, costs.num_ranks, count)
        validate(schedule)
        moves = () if select is None else select(schedule)
        sharding = config.sharding(costs.num_ranks) if config.shard_weights else None
        training = lower_training(schedule, config.post_receives, config.post_validation, moves, sharding)
        if queues is not None:
            collective_ctas(config.ctas, training, _MULTIPROCESSORS[gpu])
        for own in (training, lower_forward_only(schedule, config.post_receives, sharding)):
            if queues is not None:
                prove_for_queues(own, queues.number, queues.setting, queues.several)
    listed = show(counts) if len(counts) < 3 else f"{counts[0]} to {counts[-1]}"
    where = f", with {queues.what}" if queues is not None and queues.what else ""
    if len(proved) < len(counts):
        where += f": {len(proved)} of {len(counts)} batch sizes, evenly spread; the run proves each before it begins"
    return f"Proved free of deadlock for {listed} microbatches{where}."


def _spread(counts: Sequence[int]) -> Sequence[int]:
    """At most ``_MOST_PROVED`` of ``counts``, evenly spread, with the first and the last."""
    if len(counts) <= _MOST_PROVED:
        return counts
    return [counts[place * (len(counts) - 1) // (_MOST_PROVED - 1)] for place in range(_MOST_PROVED)]


def _uses_nccl(args: argparse.Namespace) -> bool:
    """Whether the run uses NCCL, assuming that device ``auto`` finds GPUs."""
    if args.distributed_backend is not None:
        return is_nccl(args.distributed_backend)
    return bool(args.zero_bubble_device != "cpu")


_Memory = Sequence[tuple[float, float, float]]
"""Three numbers per pipeline rank: activations, messages, and weights with gradients and optimizer state."""


def _memory(timeline: Timeline, costs: Figures, post_receives: PostReceives) -> _Memory:
    schedule = timeline.schedule
    messages = nothing = (0.0,) * costs.num_ranks
    if costs.in_bytes and costs.message_bytes:
        messages = message_memory(schedule, costs.message_bytes, post_receives)
    weights = costs.weight_bytes(schedule.placement) if costs.weight_bytes else nothing
    return list(zip(rank_memory(timeline, costs), messages, weights, strict=True))


def _check_memory(text: str, memory: _Memory, costs: Figures) -> None:
    capacity = gpu_bytes(text)
    if costs.weight_bytes is None:
        raise UserError(
            "--gpu-memory needs the size of the weights, which is not estimated for some hybrid layers; "
            f"got {text} for such a job; leave --gpu-memory out"
        )
    if not costs.in_bytes:
        raise UserError(
            f"--gpu-memory needs activation memory in bytes, which the --costs file does not have; got {text}; give "
            "the --costs of a run that recorded its memory, or leave --costs out for an estimate"
        )
    needs = [sum(parts) for parts in memory]
    fullest = max(range(len(needs)), key=needs.__getitem__)
    if needs[fullest] > capacity:
        kept, messages, weights = memory[fullest]
        raise UserError(
            f"every rank must fit --gpu-memory {text}; got {needs[fullest] / _GIB:.3g} GiB on pipeline rank {fullest} "
            f"({kept / _GIB:.3g} of activations, {messages / _GIB:.3g} of messages, {weights / _GIB:.3g} of weights "
            "and optimizer, not counting the framework's memory); use a schedule with less memory (see zero-bubble "
            "compare), more tensor or pipeline ranks, --use-distributed-optimizer or recomputation"
        )


def _check_host_memory(text: str, host: Sequence[float], costs: Figures) -> None:
    """Check the limit of a run, if memory is in bytes; the run itself checks what it takes."""
    fullest = max(range(len(host)), key=host.__getitem__)
    if costs.in_bytes and host[fullest] > parse_bytes(text):
        raise UserError(
            f"every rank must fit --zero-bubble-host-memory {text}; got {host[fullest] / _GIB:.3g} GiB of activations "
            f"on the host of pipeline rank {fullest}; raise the limit, or lower the percentage of --zero-bubble-offload"
        )


def _ranks_text(
    groups: RankGroups,
    names: Sequence[str],
    timeline: Timeline,
    costs: Figures,
    memory: _Memory,
    host: Sequence[float] | None,
) -> str:
    """Format one line per pipeline rank: its global ranks, nodes, stages and memory.

    Args:
        names: what each stage holds.
        host: host memory per rank, in the unit of memory; None without offloading.
    """
    placement = timeline.schedule.placement
    unit = "GiB" if costs.in_bytes else "microbatches"
    head = f"{'pipeline rank':14}{'ranks':11}{'nodes':8}{'stage: layers':34}{unit + ' of activations':>20}"
    head += f"{'messages':>10}" if costs.in_bytes else ""
    head += f"{'weights, optimizer':>20}{'total':>10}" if costs.in_bytes and costs.weight_bytes else ""
    lines = [head + ("" if host is None else f"{'on the host':>14}")]
    for rank in range(placement.num_ranks):
        ranks = groups.pipeline_rank(rank)
        line = f"{rank:<14}{show(ranks):11}{show(groups.nodes(ranks)):8}{_stages(placement, rank, names):34}"
        kept, messages, weights = memory[rank]
        if costs.in_bytes:
            line += f"{kept / _GIB:20.1f}{messages / _GIB:10.2f}"
            line += f"{weights / _GIB:20.1f}{sum(memory[rank]) / _GIB:10.1f}" if costs.weight_bytes else ""
        else:
            line += f"{timeline.peak_activation[rank]:20.4g}"
        lines.append(line + ("" if host is None else f"{_shown(host[rank], costs):>14}"))
    return "\n".join(lines) + "\n"


def _nodes_text(groups: RankGroups, timeline: Timeline, costs: Figures, host: Sequence[float]) -> str:
    """Format one line per set of nodes with the same memory, added over the ranks of a node."""
    device = rank_memory(timeline, costs)
    totals = [[0.0, 0.0] for _ in groups.nodes(range(groups.num_ranks))]
    for rank, parts in enumerate(zip(device, host, strict=True)):
        for one in groups.pipeline_rank(rank):
            for place, part in enumerate(parts):
                totals[one // groups.node_size][place] += part
    alike: dict[tuple[str, ...], list[int]] = {}
    for node, amounts in enumerate(totals):
        alike.setdefault(tuple(_shown(amount, costs) for amount in amounts), []).append(node)
    unit = "GiB" if costs.in_bytes else "microbatches"
    lines = [f"{'nodes':14}{unit + ' of activations per node':>34}{'on the host':>14}"]
    lines += [f"{show(nodes):14}{kept:>34}{away:>14}" for (kept, away), nodes in alike.items()]
    return "\n".join(lines) + "\n"


def _shown(amount: float, costs: Figures) -> str:
    """Format an amount of memory in the unit of the tables."""
    return f"{amount / _GIB:.1f}" if costs.in_bytes else f"{amount / costs.microbatch:.4g}"


def _stages(placement: Placement, rank: int, names: Sequence[str]) -> str:
    return ", ".join(f"{stage}: {names[stage]}" for stage in placement.stages_of(rank))


def stage_names(layers: Sequence[int | str], predictions: Sequence[int]) -> tuple[str, ...]:
    """Name what each stage holds, such as ``embedding+2``, ``M-`` or ``1+mtp+loss``, given its layers."""
    last = len(layers) - 1
    of_mtp = ("" if not count else "+mtp" if count == 1 else f"+{count} mtp" for count in predictions)
    return tuple(
        f"{'embedding+' if stage == 0 else ''}{own or 0}{mtp}{'+loss' if stage == last else ''}"
        for stage, (own, mtp) in enumerate(zip(layers, of_mtp, strict=True))
    )


def _commands(options: argparse.Namespace) -> str:
    """Format the launch command of every node."""
    if options.launch_command is None:
        return ""
    return "".join(
        f"node {node}: {options.launch_command.replace(_NODE, str(node)).strip()}\n" for node in range(options.nodes)
    )
