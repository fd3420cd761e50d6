"""Flags for offloading activations to host memory, and its figures as text and JSON."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass

from megatron.zero_bubble.core.costs.units import bytes_per_ms, parse_bytes, positive_figure
from megatron.zero_bubble.core.errors import UserError, as_flag
from megatron.zero_bubble.core.plan.offload import NO_SHARE, parse_share
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.offer import Offer
from megatron.zero_bubble.planning.offload import AUTO, HostLimits, OffloadPlan, check_copies


def add_offload(verb: argparse.ArgumentParser) -> None:
    """Add the flags."""
    verb.add_argument(
        "--host-ms",
        type=float,
        metavar="MS",
        help="time to copy the activations of a microbatch on one rank to host memory, or back, in ms (default: "
        "host_ms of --costs)",
    )
    verb.add_argument(
        "--host-bandwidth",
        type=float,
        metavar="GB/S",
        help="bandwidth between a rank and its host in one direction, in GB/s, instead of --host-ms; needs activation "
        "memory in bytes",
    )
    verb.add_argument(
        "--node-memory",
        metavar="SIZE",
        help="limit of host memory per node, for all its pipeline ranks together (default: no limit)",
    )
    verb.add_argument(
        "--ranks-per-node", type=int, metavar="N", help="pipeline ranks on a node, for --node-memory (default: 1)"
    )
    verb.add_argument(
        "--ranks-per-link",
        type=int,
        metavar="N",
        help="pipeline ranks that share one link to the host: a copy is planned to take N times as long (default: 1)",
    )


def offloads(options: argparse.Namespace) -> bool:
    """Whether something is to be offloaded.

    Raises:
        UserError: for another form of ``--offload``, or for flags that have no effect without it.
    """
    choice = options.offload or NO_SHARE
    if choice != AUTO and not parse_share(choice):
        for name in ("host_ms", "host_bandwidth", "host_memory", "node_memory", "ranks_per_node", "ranks_per_link"):
            if getattr(options, name) is not None:
                raise UserError(
                    f"{as_flag(name)} applies only to --offload; got --offload {choice}; give --offload auto or all"
                )
        return False
    return True


def with_copies(options: argparse.Namespace, costs: Figures) -> Figures:
    """Return the costs with the time of copies that the flags give.

    Raises:
        UserError: for a time and a bandwidth, an invalid one, or none.
    """
    ms, bandwidth = options.host_ms, options.host_bandwidth
    if ms is not None and bandwidth is not None:
        raise UserError("--host-ms and --host-bandwidth both give the time of copies; leave out one of them")
    if ms is not None:
        positive_figure("--host-ms", ms)
    own = costs.with_copies(ms, bytes_per_ms("--host-bandwidth", bandwidth))
    check_copies(own.of_ranks[0], options.offload)
    return own


def host_limits(options: argparse.Namespace, costs: Figures) -> HostLimits:
    """Return the limits of the host that the flags give.

    Raises:
        UserError: sizes in bytes when memory is not.
    """
    return HostLimits(
        _size(options, costs, "host_memory"),
        _size(options, costs, "node_memory"),
        1 if options.ranks_per_node is None else options.ranks_per_node,
        1 if options.ranks_per_link is None else options.ranks_per_link,
    )


def _size(options: argparse.Namespace, costs: Figures, name: str) -> float | None:
    text = getattr(options, name)
    if text is None:
        return None
    size = parse_bytes(text)
    if not costs.in_bytes:
        raise UserError(
            f"{as_flag(name)} {text} needs activation memory in bytes; give --activation-memory, a costs "
            "file with activation and wgrad, or --config"
        )
    return size


@dataclass(frozen=True)
class MovedColumns:
    """The columns of ``compare`` for offloading; see ``Columns``.

    Attributes:
        offloaded_share: share of the forwards that move to host memory; None without ``--offload``.
        host_peak: the most host memory of a rank, in the unit of the costs; None without ``--offload``.
    """

    offloaded_share: float | None = None
    host_peak: float | None = None
    head = f"{'moved':>8}{'host':>8}"

    @classmethod
    def of(cls, made: Offer) -> MovedColumns:
        """Those of a plan."""
        moved = made.part(OffloadPlan)
        return cls() if moved is None else cls(moved.share, max(moved.host_peak))

    @property
    def is_known(self) -> bool:
        """See ``Columns``."""
        return self.offloaded_share is not None

    def cells(self, costs: Figures) -> str:
        """Format the share that moves, and the peak of host memory, in GiB or microbatches."""
        if self.offloaded_share is None or self.host_peak is None:
            return f"{'':16}"
        host = self.host_peak / (2**30 if costs.in_bytes else costs.microbatch)
        return f"{self.offloaded_share:8.0%}{host:8.4g}"


def offload_summary(done: OffloadPlan, costs: Figures) -> str:
    """Format what moves, and the memory of device and host."""
    longer = f"{done.added_ms:.3f} ms longer" if done.added_ms > 0 else "no longer"
    rows = (
        ("device peak", done.device_peak),
        ("host peak", done.host_peak),
        ("pending operands of W", done.pending_wgrad),
    )
    lines = [f"offload {done.choice}: {done.share:.1%} of the forwards move, makespan {longer} than without\n"]
    for what, of_ranks in rows:
        lines.append(f"{what} by rank, in {_unit(costs)}: {_listed(of_ranks, costs)}\n")
    return "".join(lines)


def _unit(costs: Figures) -> str:
    return "GiB" if costs.in_bytes else "microbatches"


def _listed(amounts: Iterable[float], costs: Figures) -> str:
    unit = 2.0**30 if costs.in_bytes else costs.microbatch
    return " ".join(f"{amount / unit:.4g}" for amount in amounts)
