"""Flags for sharded units, and their figures as text and JSON."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from megatron.zero_bubble.cli.compared_row import gib_cell
from megatron.zero_bubble.cli.lengths import only_equal
from megatron.zero_bubble.core.analysis.score import within
from megatron.zero_bubble.core.costs.expert_layers import Experts
from megatron.zero_bubble.core.costs.model import Model
from megatron.zero_bubble.core.costs.static import ParameterBytes
from megatron.zero_bubble.core.costs.tensor import TensorParallelModel
from megatron.zero_bubble.core.costs.units import bytes_per_ms, checked_figure, refuse_huge
from megatron.zero_bubble.core.errors import UserError, as_flag
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.core.schedules import recipe
from megatron.zero_bubble.planning.candidates import Candidate
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.offer import Offer
from megatron.zero_bubble.planning.offload import AUTO
from megatron.zero_bubble.planning.shards import Replicas, ShardPlan, sharded_bound, with_collectives
from megatron.zero_bubble.planning.source import ZB_AUTO

_MOST = 1_000_000
"""Most replicas, and most whole stages."""
_GIB = 2**30
_FLAGS = ("whole_stages", "gather_ms", "reduce_ms", "replicas", "replica_bandwidth", "tensor_bandwidth")


def add_shards(verb: argparse.ArgumentParser) -> None:
    """Add the flags."""
    verb.add_argument(
        "--gather-ms",
        type=float,
        metavar="MS",
        help="time to gather all weights of a rank once from its replicas, in ms; each of its stages takes an equal "
        "part (default: gather_ms of --costs)",
    )
    verb.add_argument(
        "--reduce-ms",
        type=float,
        metavar="MS",
        help="time to reduce all gradients of a rank once over its replicas, in ms (default: reduce_ms of --costs)",
    )
    verb.add_argument("--replicas", type=int, metavar="D", help="data-parallel replicas (default: 8)")
    verb.add_argument(
        "--replica-bandwidth",
        type=float,
        metavar="GB/S",
        help="bandwidth with which a rank sends to its replicas, in GB/s, instead of --gather-ms and --reduce-ms; "
        "needs --config",
    )


def add_tensor(verb: argparse.ArgumentParser) -> None:
    """Add the flag that lists tensor parallelism."""
    verb.add_argument(
        "--tensor-bandwidth",
        type=float,
        metavar="GB/S",
        help="also list tensor parallelism over the replicas of --shard-weights, or over groups of them: the bandwidth "
        "with which a rank sends to its tensor-parallel group, in GB/s; needs --config",
    )


def tensor_rate(options: argparse.Namespace, costs: Figures) -> float | None:
    """Return the bytes per ms that a rank sends to its tensor-parallel group; None where it is not to be listed.

    Raises:
        UserError: for an invalid bandwidth, or a model whose shapes are unknown or that is divided already.
    """
    rate = bytes_per_ms("--tensor-bandwidth", options.tensor_bandwidth)
    if rate is not None and costs.tensor is None:
        raise UserError(
            "--tensor-bandwidth needs the shapes of a model without tensor parallelism; got "
            f"{options.config or 'times'}; give --config with a file that has tensor-model-parallel-size: 1, or leave "
            "--tensor-bandwidth out"
        )
    return rate


def shards(options: argparse.Namespace) -> bool:
    """Whether weights are to be sharded.

    Raises:
        UserError: for flags that have no effect without that.
    """
    schedule = getattr(options, "schedule", None)
    if options.unit_microbatches is not None and hasattr(options, "schedule"):
        units = schedule is not None and schedule != ZB_AUTO and recipe(schedule).has_units
        if not (units or options.shard_weights):
            raise UserError(
                f"--unit-microbatches is for zero-pp, or for --shard-weights; got {schedule or 'a file'}; leave it out"
            )
    is_fixed = hasattr(options, "schedule") and schedule != ZB_AUTO and not options.shard_weights
    if is_fixed and options.num_chunks == AUTO:
        raise UserError(
            f"--num-chunks auto applies only to {ZB_AUTO}, and to --shard-weights, whose stages per rank are chosen "
            "together with units; give a number, or use zero-bubble compare, which lists several"
        )
    if not options.shard_weights:
        for name in _FLAGS if hasattr(options, "schedule") else (*_FLAGS, "unit_microbatches"):
            if getattr(options, name, None) is not None:
                raise UserError(f"{as_flag(name)} applies only to --shard-weights; give both, or leave it out")
        return False
    if getattr(options, "lengths", None) is not None:
        raise only_equal("--shard-weights")
    for name in ("whole_stages", "replicas"):
        if (count := getattr(options, name)) not in (None, AUTO) and not 1 <= count <= _MOST:
            raise UserError(f"{as_flag(name)} must be from 1 to {_MOST:,}; got {count}; give another number")
    return True


def replicas(options: argparse.Namespace) -> int:
    """The replicas that weights are sharded over."""
    return 8 if options.replicas is None else int(options.replicas)


def notes_on_replicas(
    options: argparse.Namespace, model: Model, num_microbatches: int, parts: ParameterBytes
) -> Iterator[str]:
    """Yield whether a memory limit includes weights, and how tensor parallelism over as many GPUs compares, one after
    the other for the microbatches of all replicas.

    Raises:
        UserError: for replicas that do not have whole copies of the experts.
    """
    frozen = f"{parts.weight} bytes per parameter, trained ones {parts.whole}"
    each = f"({parts.whole} bytes per parameter)" if model.is_trained else f"({frozen})"
    if not getattr(options, "shard_weights", False):
        yield f"The memory limit does not include weights and optimizer {each}."
        return
    if model.experts is not None:
        yield _on_experts(model.experts, model.tensor_parallel, replicas(options))
    yield f"A memory limit in bytes includes weights, gradients and optimizer {each}, one in microbatches does not."
    if model.is_divisible:
        ranks = replicas(options)
        sent = TensorParallelModel(model, ranks).sent(num_microbatches * ranks)
        static = max(model.weights(Placement.linear(len(model.layers)))) * parts.whole / ranks
        yield (
            f"Tensor parallelism over {ranks} GPUs, instead of replicas, would send {sent / 2**30:.4g} GiB per rank "
            f"for as many samples, and hold {static / 2**30:.4g} GiB of weights, gradients and optimizer."
        )


def _on_experts(experts: Experts, tensor_parallel: int, count: int) -> str:
    """Over how many replicas experts are sharded, as a sentence.

    Raises:
        UserError: for replicas that do not have whole copies of the experts.
    """
    ranks = experts.parallel * experts.tensor_parallel
    copies, rest = divmod(count * tensor_parallel, ranks)
    if rest or not copies:
        least = ranks // math.gcd(ranks, tensor_parallel)
        raise UserError(
            f"--replicas must be a multiple of {least}, the replicas that have one copy of the experts together; got "
            f"{count}; give {least}, or a multiple of it"
        )
    if copies == 1:
        return (
            f"The {count} replicas have one copy of the experts together, which stay whole: only the rest is sharded."
        )
    return f"Experts are sharded over the {copies} copies of them that the {count} replicas have."


def with_shards(options: argparse.Namespace, costs: Figures) -> Figures:
    """Return the figures with the times of the collectives that the flags give.

    Raises:
        UserError: for times and a bandwidth, or an invalid one.
    """
    times, bandwidth = (options.gather_ms, options.reduce_ms), options.replica_bandwidth
    if bandwidth is not None and times != (None, None):
        raise UserError("--replica-bandwidth gives the times of --gather-ms and --reduce-ms; leave out either")
    for name in ("gather_ms", "reduce_ms"):
        if (figure := getattr(options, name)) is not None:
            refuse_huge(**{as_flag(name): figure})
            checked_figure(as_flag(name), figure)
    rate = bytes_per_ms("--replica-bandwidth", bandwidth)
    return with_collectives(costs, replicas(options), *times, rate)


def with_tensor(options: argparse.Namespace, costs: Figures) -> tuple[Figures, float | None]:
    """Return the figures, and the bytes per ms of tensor parallelism that ``compare`` also lists, if any."""
    if not options.shard_weights:
        return costs, None
    rate = tensor_rate(options, costs)
    return replace(costs, notes=(*costs.notes, *_omitted(rate))), rate


def _omitted(rate: float | None) -> Iterator[str]:
    """Yield what the times of the rows leave out, and how tensor parallelism is estimated."""
    yield "Times of rows that are not sharded leave out the collectives of a distributed optimizer, once per iteration."
    if rate is not None:
        yield (
            "Rows with tpN divide layers among N of the replicas, with sequence parallelism: passes take 1/N of the "
            f"time, and none of the all-reduces, at {rate / 1e6:g} GB/s, is hidden."
        )


@dataclass(frozen=True)
class UnitColumns:
    """The columns of ``compare`` for what replicas exchange and hold; see ``Columns``.

    Attributes:
        gathers, reductions: collectives of a rank per iteration; None where weights are not sharded.
        static_bytes: weights, gradients and optimizer, on the rank that needs most in total; None if unknown.
        replica_bytes: what a rank sends to its replicas per iteration; None if unknown.
        tensor_parallel: number of GPUs that divide a layer instead of replicas; None where layers are whole.
        tensor_bytes: what a rank sends to these GPUs per iteration; None where layers are whole.
    """

    gathers: int | None = None
    reductions: int | None = None
    static_bytes: float | None = None
    replica_bytes: float | None = None
    tensor_parallel: int | None = None
    tensor_bytes: float | None = None
    head = f"{'gathers':>9}{'reduces':>9}{'static':>8}{'sent':>8}"

    @classmethod
    def of(cls, made: Offer, row: Candidate, over: Replicas | None) -> UnitColumns:
        """Those of a row and its plan."""
        units, placement = made.part(ShardPlan), made.schedule.placement
        sent, static = (None, None) if over is None else over.bytes_of(made.parts, made.costs, placement)
        return cls(
            None if units is None else max(units.gathers),
            None if units is None else max(units.reductions),
            None if static is None else max(static),
            None if sent is None else max(sent),
            row.tensor_parallel,
            row.tensor_bytes,
        )

    @property
    def is_known(self) -> bool:
        """See ``Columns``."""
        return self.gathers is not None

    def cells(self, costs: Figures) -> str:
        """Format collectives, static memory in GiB, and what a rank sends to replicas and to parts of layers."""
        counts = ("" if count is None else count for count in (self.gathers, self.reductions))
        sent = None if self.replica_bytes is None else self.replica_bytes + (self.tensor_bytes or 0.0)
        return "".join(f"{count:>9}" for count in counts) + gib_cell(self.static_bytes) + gib_cell(sent)


def shard_summary(over: Replicas, plan: ShardPlan, costs: Figures) -> str:
    """Format the collectives, their traffic, memory, and a lower bound."""
    of = plan.sharding
    lines = [
        f"{over.count} replicas, units of {of.unit_microbatches} microbatches, {of.open_chunks} whole stages",
        f"per rank: {max(plan.gathers)} gathers, {max(plan.reductions)} reductions, {plan.lane_ms:.3f} ms together",
    ]
    if plan.traffic is not None:
        lines.append(f"GiB by rank, sent to replicas per iteration: {_gib(plan.traffic)}")
    if plan.static is not None:
        lines.append(f"GiB by rank, shards and whole weights and gradients: {_gib(plan.static)}")
        lines.append(f"GiB by rank, these and activations: {_gib(plan.peaks)}")
    if (limit := min(over.limit, over.activation_limit)) < math.inf:
        peak = max(plan.peaks if over.limit < math.inf else plan.activations)
        verdict = "met" if within(peak, limit) else "EXCEEDED"
        lines.append(f"memory limit {costs.show(limit)}: {verdict}, peak {costs.show(peak)} per rank")
    least, why = sharded_bound(plan, costs)
    lines.append(f"lower bound {least:.3f} ms makespan, for units of any size ({why})")
    return "".join(f"{line}\n" for line in lines)


def _gib(amounts: Iterable[float]) -> str:
    return " ".join(f"{amount / _GIB:.3g}" for amount in amounts)
