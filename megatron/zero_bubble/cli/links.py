"""Flags for the links between GPUs, and the times of what goes over them."""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import permutations

from megatron.zero_bubble.cli.rank_groups import RankGroups
from megatron.zero_bubble.costs.estimate import DEVICES
from megatron.zero_bubble.costs.expert_layers import Links
from megatron.zero_bubble.costs.units import bytes_per_ms, positive_figure
from megatron.zero_bubble.planning.figures import Figures

NETWORK_GBS = 50.0
"""The assumed bandwidth per GPU between nodes, in GB/s: one network adapter of 400 Gbit/s per GPU."""


def add_link_flags(verb: argparse.ArgumentParser) -> None:
    """Add the bandwidths of transfers."""
    verb.add_argument(
        "--link-bandwidth",
        type=float,
        metavar="GB/S",
        help="bandwidth per GPU of transfers inside a node, also of the all-to-alls of experts, in GB/s (default: "
        "that of --gpu)",
    )
    verb.add_argument(
        "--network-bandwidth",
        type=float,
        metavar="GB/S",
        help=f"bandwidth per GPU of transfers between nodes, in GB/s (default: {NETWORK_GBS:g})",
    )


def with_bandwidths(
    costs: Figures, groups: RankGroups, gpu: str, link_gbs: float | None, network_gbs: float | None, estimated: bool
) -> Figures:
    """Return ``costs`` with the times of transfers inside a node and between nodes, and a note that states them.

    Costs that are not estimated keep their times unless a bandwidth is given.

    Args:
        link_gbs: bandwidth per GPU inside a node, in GB/s; None for that of ``gpu``.
        network_gbs: bandwidth per GPU between nodes, in GB/s; None for ``NETWORK_GBS``.
        estimated: whether the times are estimates for ``gpu``, not those of a run.

    Raises:
        UserError: for a bandwidth that is not positive, or gives a time above ``MAX_FIGURE``.
    """
    link, network = bytes_per_ms("--link-bandwidth", link_gbs), bytes_per_ms("--network-bandwidth", network_gbs)
    given = link is not None or network is not None
    ranks, size = range(costs.num_ranks), costs.message_bytes
    if not given and not estimated:
        return costs
    assert size is not None, "the flags of a job give the size of its messages"
    device = DEVICES[gpu]
    inside = device.latency_ms + size / (link or device.link_gbs * 1e6)
    between = device.latency_ms + size / (network or NETWORK_GBS * 1e6)
    crossing = groups.crossing()
    links = {pair: between if pair in crossing else inside for pair in permutations(ranks, 2)}
    hops = sum(1 for rank in ranks[1:] if (rank - 1, rank) in crossing)
    notes = []
    if link is not None:
        notes.append(f"Transfers inside a node: {device.latency_ms:g} ms + bytes at {link / 1e6:g} GB/s.")
    if hops:
        notes.append(
            f"Transfers between nodes, {hops} of the pipeline's {costs.num_ranks - 1} hops: {device.latency_ms:g} ms + "
            f"bytes at {(network or NETWORK_GBS * 1e6) / 1e6:g} GB/s"
            f"{'.' if network is not None else ', assumed; give --network-bandwidth.'}"
        )
    return replace(costs.with_links(links), notes=(*costs.notes, *notes))


def add_links(verb: argparse.ArgumentParser) -> None:
    """Add the flags."""
    for flag, where in (("--link-bandwidth", "within a node"), ("--network-bandwidth", "between nodes")):
        verb.add_argument(
            flag,
            type=float,
            metavar="GB/S",
            help=f"bandwidth with which a rank sends {where} in the all-to-alls of experts, in GB/s, for an estimate "
            "(default: that of --gpu)",
        )


def links_of(options: argparse.Namespace, gpus_per_node: int) -> Links:
    """The links by the flags.

    Raises:
        UserError: a bandwidth that is not a finite number above 0.
    """
    rates = (("--link-bandwidth", options.link_bandwidth), ("--network-bandwidth", options.network_bandwidth))
    return Links(gpus_per_node, *(None if gbs is None else positive_figure(flag, gbs) for flag, gbs in rates))
