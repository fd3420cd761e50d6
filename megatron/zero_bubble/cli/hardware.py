"""The GPUs of a job and their links, as flags describe them, and what the job costs there."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import NamedTuple

from megatron.zero_bubble.cli.job_figures import CostsInput, job_figures
from megatron.zero_bubble.cli.launcher import Assumed
from megatron.zero_bubble.cli.links import add_link_flags, given_links, with_transfers
from megatron.zero_bubble.cli.machine import ASSUMED
from megatron.zero_bubble.cli.rank_groups import RankGroups
from megatron.zero_bubble.core.costs.devices import DEVICES, NODE, Device
from megatron.zero_bubble.core.costs.units import checked_share, positive_figure
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.layout import job_layers
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.vocabulary import costs_of_run

_LAUNCHED = "(default: that of a command with a launcher after --, else "


def add_gpu(verb: argparse.ArgumentParser, text: str) -> None:
    """Add the flag that names a GPU."""
    verb.add_argument(
        "--gpu", type=str.lower, choices=tuple(DEVICES), default=ASSUMED, help=f"{text} (default: {ASSUMED})"
    )


def add_hardware(verb: argparse.ArgumentParser, gpu_memory: str) -> None:
    """Add the flags that say where a job runs, and what it costs there; ``gpu_memory`` is the help of that limit."""
    verb.add_argument("--nodes", type=int, default=Assumed(1), metavar="N", help=f"number of nodes {_LAUNCHED}1)")
    verb.add_argument(
        "--gpus-per-node",
        type=int,
        default=Assumed(8),
        metavar="G",
        help=f"GPUs per node, one process each {_LAUNCHED}8)",
    )
    add_gpu(verb, "GPU to estimate for")
    verb.add_argument(
        "--tflops",
        type=float,
        metavar="T",
        help="dense peak in bf16 of another GPU than --gpu, which is like it in all else; peaks in FP8 and FP4 change "
        "in proportion",
    )
    verb.add_argument(
        "--efficiency",
        type=float,
        metavar="E",
        help="share of the peak that matrix products reach, from 0 to 1 (default: that of --gpu)",
    )
    verb.add_argument("--gpu-memory", metavar="SIZE", help=gpu_memory)
    verb.add_argument(
        "--costs",
        type=CostsInput,
        metavar="FILE",
        help="pass times and memory that a run of the job has measured, instead of estimates",
    )
    add_link_flags(verb)


def device_of(options: argparse.Namespace) -> Device:
    """The GPU as the flags describe it, with the links and the domain of the job.

    Raises:
        UserError: a peak, an efficiency or a bandwidth that is none.
    """
    device, (node, network) = DEVICES[options.gpu], given_links(options)
    faster = 1.0 if options.tflops is None else positive_figure("--tflops", options.tflops) / device.tflops
    share = device.efficiency if options.efficiency is None else checked_share("--efficiency", options.efficiency)
    if not share:
        raise UserError("--efficiency must be above 0; got 0; give the share of the peak that products reach")
    return replace(
        device,
        tflops=faster * device.tflops,
        fp8_tflops=device.fp8_tflops and faster * device.fp8_tflops,
        fp4_tflops=device.fp4_tflops and faster * device.fp4_tflops,
        efficiency=share,
        link_gbs=node.gbs or device.link_gbs,
        node_gbs=node.gbs or device.node_gbs,
        network_gbs=network.gbs or device.network_gbs,
        domain=_domain(options.nodes, options.gpus_per_node, device.domain),
        pace=getattr(options, "pace", 1.0),
    )


def _domain(nodes: int, gpus_per_node: int, most: int) -> int:
    """The GPUs of a job that share fast links: those of a node, or of as many nodes of a rack in every rack."""
    if most <= NODE:
        return gpus_per_node
    together = (count for count in range(1, max(1, most // gpus_per_node) + 1) if nodes % count == 0)
    return gpus_per_node * max(together)


class JobCosts(NamedTuple):
    """The costs of a job.

    Attributes:
        whole: those that other setups of it are planned with.
        own: those that it runs with, as its setup divides it.
        groups: its ranks, by domain instead of node.
    """

    whole: Figures
    own: Figures
    groups: RankGroups


def job_costs(options: argparse.Namespace, args: argparse.Namespace, costs: CostsInput | None) -> JobCosts:
    """The costs of a job with checked ``args`` where ``options`` run it.

    Raises:
        UserError: as ``device_of``, or for an invalid costs file.
    """
    device = device_of(options)
    groups = replace(RankGroups.of(args, options.nodes, options.gpus_per_node), node_size=device.domain)
    figures = job_figures(args, job_layers(args), device, costs)
    estimated = costs is None and figures.on(args.placement)[0].comm_ms > 0
    figures = with_transfers(figures, groups, device, given_links(options), estimated)
    notes = []
    if device.domain > options.gpus_per_node and groups.num_ranks > device.domain:
        notes.append(f"Fast links connect {device.domain} GPUs, which count as one node.")
    if device.pace != 1.0:
        notes.append(
            f"Passes take {device.pace:.3f} of what peaks and bandwidths say, so that the job as it is takes the "
            f"measured {options.measured_ms:,.10g} ms, in which the optimizer step and all else count as passes."
        )
    whole = replace(figures, notes=(*figures.notes, *notes))
    return JobCosts(whole, costs_of_run(whole, args.zero_bubble.setup) if args.run.has_schedule else whole, groups)
