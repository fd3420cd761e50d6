"""Check before a run that what it offloads fits into host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron.zero_bubble.core.analysis.memory import host_peaks
from megatron.zero_bubble.core.costs.devices import DEVICES
from megatron.zero_bubble.core.costs.estimate import estimate
from megatron.zero_bubble.core.costs.units import format_bytes, parse_bytes
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Plan, Schedule
from megatron.zero_bubble.core.plan.offload import MoveSelection, offload
from megatron.zero_bubble.planning.job.model import model_of, unestimated_kinds

_UNSURE = ("fp8", "fp4")


def check_host_memory(
    args: Any, layers: tuple[int, ...], limit: str, schedule: Schedule, select: MoveSelection, node_size: int
) -> None:
    """Check the limit of host memory against what a plan moves, estimated from the shapes of the model.

    The estimate is for flash attention and balanced experts, and leaves out logits. Jobs in FP8 or FP4, whose copies
    depend on the version of TransformerEngine, and layers that are not estimated are not checked here: the run itself
    checks every byte that it takes.

    Args:
        args: the checked flags of the job, in our loop or in Megatron-LM.
        layers: layers per stage.
        limit: for example ``60GiB``.
        select: what moves in ``schedule``.
        node_size: processes per node.

    Raises:
        UserError: a rank needs more; the message has what the fullest rank and its node need.
    """
    if any(getattr(args, name, None) for name in _UNSURE) or unestimated_kinds(args):
        return
    sequence = args.seq_length // args.context_parallel_size
    model = replace(model_of(args, layers), sequence=sequence, vocab_size=0)
    _, memory = estimate(model, DEVICES["a100"], schedule.placement)
    needs = host_peaks(offload(Plan.bare(schedule), select(schedule)), memory)
    fullest = max(range(len(needs)), key=needs.__getitem__)
    if needs[fullest] <= parse_bytes(limit):
        return
    node = (
        f"{format_bytes(max(_of_nodes(needs, args, node_size)))} on a node of {node_size} rank{'s' * (node_size > 1)}"
    )
    raise UserError(
        f"activations in host memory must fit in --zero-bubble-host-memory, {limit} per rank; {schedule.name} needs an "
        f"estimated {format_bytes(needs[fullest])} on pipeline rank {fullest}, and {node}; raise the limit, or "
        "lower the percentage of --zero-bubble-offload"
    )


def _of_nodes(needs: Sequence[float], args: Any, node_size: int) -> list[float]:
    """Add the needs of the ranks of each node, for the needs of every pipeline rank."""
    near = args.tensor_model_parallel_size * args.context_parallel_size
    # Data-parallel ranks are nearer than pipeline ranks, unless --use-tp-pp-dp-mapping makes them farther.
    stride = near * (1 if getattr(args, "use_tp_pp_dp_mapping", False) else args.data_parallel_size)
    world = range(near * args.data_parallel_size * len(needs))
    of_ranks = [needs[rank // stride % len(needs)] for rank in world]
    return [sum(of_ranks[first : first + node_size]) for first in range(0, len(world), node_size)]
