"""``zero-bubble dry-run``: check and describe a training job before any node is allocated.

The flags of the job go through the parser and the checks of the training run, and its schedule through the same proofs
as in a run. No process is started, and neither torch nor a GPU is needed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from megatron.zero_bubble.cli.advice_text import not_read
from megatron.zero_bubble.cli.deciding import decided
from megatron.zero_bubble.cli.gpu_memory import beyond
from megatron.zero_bubble.cli.hardware import add_hardware
from megatron.zero_bubble.cli.job_figures import gpu_bytes
from megatron.zero_bubble.cli.job_words import add_job_words, job_words
from megatron.zero_bubble.cli.megatron_job import MegatronJob, checked_megatron_job
from megatron.zero_bubble.cli.planned_job import RankMemory, planned_job
from megatron.zero_bubble.cli.progress import working
from megatron.zero_bubble.cli.rank_groups import RankGroups, checked_world_size, show
from megatron.zero_bubble.cli.stock import against_stock
from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.costs.units import parse_bytes
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.layout import job_predictions
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.core.render.text import headline, imbalance
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.job.arguments.model_checks import missing_packages as packages_of_ours
from megatron.zero_bubble.planning.job.facts import remarks_at_start
from megatron.zero_bubble.planning.job.installed import missing_packages as packages_of_megatrons
from megatron.zero_bubble.planning.job.pattern import contents
from megatron.zero_bubble.planning.plans import rank_memory, slower_than_1f1b
from megatron.zero_bubble.planning.setup import Setup

_COPIES = "Copies to host memory and back are not in the times, unless the costs file has host_ms."
_BALANCE = (
    "another --pipeline-model-parallel-layout (zero-bubble plan --layout auto finds one) or "
    "--zero-bubble-vocabulary-parallel may balance the ranks"
)
_NODE = "@node@"
_GIB = 2**30


def add_dry_run(verb: argparse.ArgumentParser) -> None:
    """Add the flags of ``dry-run``; the flags of the job follow after ``--``."""
    verb.usage = "%(prog)s [OPTION ...] -- FLAGS"
    verb.description = (
        "Check a training job without starting it, and print its rank layout, plan and memory. If the run would "
        "reject the job, print the same error and exit with code 2."
    )
    add_hardware(verb, "end with exit code 2 if a rank needs more memory than this, e.g. 80GiB")
    verb.add_argument(
        "--megatron-lm", action="store_true", help="the flags are for Megatron-LM's training script, not for ours"
    )
    verb.add_argument(
        "--launch-command",
        metavar="TEXT",
        help=f"command to print for each node, with {_NODE} replaced by the node's number, e.g. 'torchrun "
        f"--node-rank {_NODE} ...'; scripts/launch_torchrun.sh --dry-run gives it",
    )
    add_job_words(verb)
    verb.set_defaults(command=dry_run)


@working("checking the job and its plan")
def dry_run(options: argparse.Namespace) -> str:
    """Make the whole report.

    Raises:
        UserError: the error that the run would stop with, or a rank that needs more than ``--gpu-memory``.
    """
    checked_world_size(options.nodes, options.gpus_per_node)
    args, unread, replaced = _checked_job(options)
    job = planned_job(options, args, options.megatron_lm)
    costs, timeline, memory, host = job.costs, job.timeline, job.memory, job.host
    if options.gpu_memory is not None:
        _check_memory(options.gpu_memory, memory, costs)
    if host is not None and args.zero_bubble.host_memory is not None:
        _check_host_memory(args.zero_bubble.host_memory, host, costs)
    copied = None if host is None else _COPIES
    uneven = None if (found := imbalance(timeline)) is None else f"{found}: {_BALANCE}"
    facts = {name: value for name, value in costs.facts.items() if name != "gpu"}  # which is assumed
    config = args.zero_bubble if args.run.has_schedule else None
    of_job = remarks_at_start(args, args.source, costs.num_microbatches, config, lambda: facts)
    remarks = filter(None, (*_compared(options, args, timeline, costs), uneven, copied, *of_job))
    missing = (packages_of_megatrons if options.megatron_lm else packages_of_ours)(args)
    needed = (f"The job also needs {package}, which is not installed here." for package in missing)
    too_large = beyond(options, job.need) if costs.in_bytes and costs.knows_weights else None
    given = (*costs.notes, *([] if too_large is None else [too_large]))
    notes = (*(f"{line}." for line in replaced), *given, *remarks, *needed)
    sections = [
        job.groups.text() + job.groups.warning(),
        _ranks_text(
            job.groups, stage_names(contents(args, job.layers), job_predictions(args)), timeline, costs, memory, host
        ),
        "" if host is None else _nodes_text(job.groups, timeline, costs, host),
        "".join(f"{line}\n" for line in (headline(timeline), job.proved, *notes)),
        _commands(options),
    ]
    if unread:
        sections.insert(-1, "".join(f"{line}\n" for line in not_read(unread)))
    return "\n".join(section for section in sections if section)


def _compared(
    options: argparse.Namespace, args: argparse.Namespace, timeline: Timeline, costs: Figures
) -> tuple[str | None, ...]:
    """Return sentences on Megatron's own schedule and on 1F1B, if these can be compared with the job's."""
    if not args.run.has_schedule or args.run.setup.running(Setup.of(timeline.schedule)).divides:
        return ()
    objective = args.run.setup.objective
    compared = against_stock(options, job_words(options), costs, timeline, objective)
    return compared, slower_than_1f1b(timeline, costs, objective)


def _checked_job(options: argparse.Namespace) -> MegatronJob:
    """Parse and check the job's flags as the run does."""
    from megatron.zero_bubble.planning.job.arguments.checks import check
    from megatron.zero_bubble.planning.job.arguments.parser import expanded, parse

    world_size = options.nodes * options.gpus_per_node
    job = job_words(options)
    of_ranks = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(options.gpus_per_node)}
    ranks = {**os.environ, **of_ranks, "RANK": "-1"}  # which writes nothing
    decision, decisions = decided(job if options.megatron_lm else expanded(job), ranks)
    job = decision if decisions else job
    if options.megatron_lm:
        read = checked_megatron_job(job, world_size, options.gpus_per_node)
        return read._replace(replaced=(*read.replaced, *decisions))
    args = parse(job)
    switched_off = check(args, world_size, options.gpus_per_node)
    if args.run.balance is not None:
        raise UserError(
            "a dry run needs the number of microbatches of an iteration, which depends on the documents with "
            "--zero-bubble-balance-microbatches; drop the flag, to check the job with microbatches of full length"
        )
    return MegatronJob(args, (), (*switched_off, *decisions))


def _check_memory(text: str, memory: RankMemory, costs: Figures) -> None:
    capacity = gpu_bytes(text)
    if not costs.knows_weights:
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
            "compare), more tensor or pipeline ranks, --use-distributed-optimizer or recomputation, or --costs with a "
            "file that the job has recorded, if it runs all the same"
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
    memory: RankMemory,
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
    head += f"{'weights, optimizer':>20}{'total':>10}" if costs.in_bytes and costs.knows_weights else ""
    lines = [head + ("" if host is None else f"{'on the host':>14}")]
    for rank in range(placement.num_ranks):
        ranks = groups.pipeline_rank(rank)
        line = f"{rank:<14}{show(ranks):11}{show(groups.nodes(ranks)):8}{_stages(placement, rank, names):34}"
        kept, messages, weights = memory[rank]
        if costs.in_bytes:
            line += f"{kept / _GIB:20.1f}{messages / _GIB:10.2f}"
            line += f"{weights / _GIB:20.1f}{sum(memory[rank]) / _GIB:10.1f}" if costs.knows_weights else ""
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
