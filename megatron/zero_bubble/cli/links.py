"""Flags for the links between GPUs, and the times of what goes over them."""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import permutations
from typing import NamedTuple

from megatron.zero_bubble.cli.rank_groups import RankGroups
from megatron.zero_bubble.core.costs.devices import Device
from megatron.zero_bubble.core.costs.units import checked_figure, positive_figure
from megatron.zero_bubble.planning.figures import Figures


class GivenLinks(NamedTuple):
    """What the flags give of the links of one kind; None for what they leave to the defaults.

    Attributes:
        gbs: bandwidth per GPU, in GB/s.
        us: latency of a transfer, in microseconds.
    """

    gbs: float | None = None
    us: float | None = None

    def ms(self, size: float, gbs: float, latency_ms: float) -> float:
        """The time of a transfer of ``size`` bytes, with defaults."""
        return self.latency(latency_ms) + size / ((self.gbs or gbs) * 1e6)

    def latency(self, default_ms: float) -> float:
        """The latency in ms."""
        return default_ms if self.us is None else self.us / 1e3


def add_link_flags(verb: argparse.ArgumentParser) -> None:
    """Add the bandwidths and the latencies of transfers."""
    verb.add_argument(
        "--link-bandwidth",
        type=float,
        metavar="GB/S",
        help="bandwidth per GPU of transfers inside a node, also of the collectives of tensor parallelism and experts, "
        "in GB/s (default: that of --gpu)",
    )
    verb.add_argument(
        "--network-bandwidth",
        type=float,
        metavar="GB/S",
        help="bandwidth per GPU of transfers between nodes, also of the all-to-alls of experts, in GB/s (default: that "
        "of --gpu)",
    )
    for kind, where in (("link", "inside a node"), ("network", "between nodes")):
        verb.add_argument(
            f"--{kind}-latency",
            type=float,
            metavar="US",
            help=f"latency of a transfer {where}, in microseconds; its bytes take more (default: that of --gpu)",
        )


def given_links(options: argparse.Namespace) -> tuple[GivenLinks, GivenLinks]:
    """What the flags of ``add_link_flags`` give, inside a node and between nodes.

    Raises:
        UserError: for a bandwidth that is not positive, or a latency that is negative or not finite.
    """
    for flag, gbs in _bandwidths(options):
        if gbs is not None:
            positive_figure(flag, gbs)
    for flag, us in (("--link-latency", options.link_latency), ("--network-latency", options.network_latency)):
        if us is not None:
            checked_figure(flag, us)
    node = GivenLinks(options.link_bandwidth, options.link_latency)
    return node, GivenLinks(options.network_bandwidth, options.network_latency)


def _bandwidths(options: argparse.Namespace) -> tuple[tuple[str, float | None], ...]:
    return ("--link-bandwidth", options.link_bandwidth), ("--network-bandwidth", options.network_bandwidth)


def with_transfers(
    costs: Figures, groups: RankGroups, device: Device, given: tuple[GivenLinks, GivenLinks], estimated: bool
) -> Figures:
    """Return ``costs`` with the times of transfers inside a node and between nodes, and a note that states them.

    Costs that are not estimated keep their times unless a bandwidth or a latency is given.

    Args:
        given: the links inside a node and between nodes.
        estimated: whether the times are estimates for ``device``, not those of a run.

    Raises:
        UserError: for a time above ``MAX_FIGURE``.
    """
    node, network = given
    ranks, size = range(costs.num_ranks), costs.message_bytes
    if given == (GivenLinks(), GivenLinks()) and not estimated:
        return costs
    assert size is not None, "the flags of a job give the size of its messages"
    inside = node.ms(size, device.link_gbs, device.latency_ms)
    between = network.ms(size, device.network_gbs, device.latency_ms)
    crossing = groups.crossing()
    links = {pair: between if pair in crossing else inside for pair in permutations(ranks, 2)}
    hops = sum(1 for rank in ranks[1:] if (rank - 1, rank) in crossing)
    notes = []
    if node != GivenLinks():
        notes.append(f"Transfers inside a node: {_shown(node, device.latency_ms, device.link_gbs)}.")
    if hops:
        assumed = "." if network.gbs is not None else ", assumed; give --network-bandwidth."
        what = f"Transfers between nodes, {hops} of the pipeline's {costs.num_ranks - 1} hops"
        notes.append(f"{what}: {_shown(network, device.latency_ms, device.network_gbs)}{assumed}")
    return replace(costs.with_links(links), notes=(*costs.notes, *notes))


def bandwidth_to_replicas(groups: RankGroups, device: Device) -> float:
    """The bytes per ms that a rank sends to its data-parallel replicas, some of which may be on other nodes."""
    crosses = any(len(groups.nodes(ranks)) > 1 for ranks in groups.groups("data"))
    return 1e6 * (device.network_gbs if crosses else device.link_gbs)


def _shown(link: GivenLinks, latency_ms: float, gbs: float) -> str:
    return f"{link.latency(latency_ms):g} ms + bytes at {link.gbs or gbs:g} GB/s"


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


def linked(options: argparse.Namespace, device: Device) -> Device:
    """A GPU with the links that the flags of ``add_links`` give, and with the GPUs of a node that share them.

    Raises:
        UserError: a bandwidth that is not a finite number above 0.
    """
    node, network = (None if gbs is None else positive_figure(flag, gbs) for flag, gbs in _bandwidths(options))
    domain = options.gpus_per_node or device.domain
    return replace(device, node_gbs=node or device.node_gbs, network_gbs=network or device.network_gbs, domain=domain)
