"""Compute the global ranks and nodes of every parallel group, before any process exists.

megatron-core numbers ranks so that tensor-parallel ranks are adjacent, followed by context and data; pipeline ranks
are farthest apart: ``rank = tensor + T * (context + C * (data + D * pipeline))``. With Megatron-LM's
``--use-tp-pp-dp-mapping`` data-parallel ranks are farthest apart. Expert groups divide the same ranks separately, by
expert tensor, expert and expert data.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, permutations

from megatron.zero_bubble.core.errors import UserError

_SHOWN = 60
"""Maximum number of characters for the list of groups in a line."""
_MOST_PROCESSES = 1_000_000
"""More processes than any cluster has."""


def checked_world_size(num_nodes: int, node_size: int) -> int:
    """Return the number of processes of a job, one per GPU.

    Raises:
        UserError: for numbers below 1, or more processes than any cluster has.
    """
    for flag, count in (("--nodes", num_nodes), ("--gpus-per-node", node_size)):
        if count < 1:
            raise UserError(f"{flag} must be 1 or more; got {count}")
    if num_nodes * node_size > _MOST_PROCESSES:
        raise UserError(
            f"--nodes x --gpus-per-node must be at most {_MOST_PROCESSES:,}; got {num_nodes:,} x {node_size:,}; give "
            "smaller numbers"
        )
    return num_nodes * node_size


@dataclass(frozen=True)
class RankGroups:
    """The parallel groups of a job with ``node_size`` ranks per node.

    ``sizes`` maps each kind of group to its size, the kind with adjacent ranks first. ``expert_sizes`` is the same for
    experts, and empty for a dense model.
    """

    node_size: int
    sizes: dict[str, int]
    expert_sizes: dict[str, int]

    @classmethod
    def of(cls, args: argparse.Namespace, num_nodes: int, node_size: int) -> RankGroups:
        """Build the groups from checked ``args``."""
        pipeline, pipeline_first = args.pipeline_model_parallel_size, args.use_tp_pp_dp_mapping
        near = {"tensor": args.tensor_model_parallel_size, "context": args.context_parallel_size}
        sizes = {**near, **_far("data", args.data_parallel_size, pipeline, pipeline_first)}
        if args.num_moe_experts is None:
            return cls(node_size, sizes, {})
        expert = args.expert_model_parallel_size
        expert_tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
        data = num_nodes * node_size // (expert_tensor * expert * pipeline)
        near = {"expert tensor": expert_tensor, "expert": expert}
        return cls(node_size, sizes, {**near, **_far("expert data", data, pipeline, pipeline_first)})

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple({**self.sizes, **self.expert_sizes})

    def groups(self, kind: str) -> list[tuple[int, ...]]:
        """Return the global ranks of every group of ``kind``."""
        stride, span = self._strides(kind)
        firsts = (rank for rank in range(self.num_ranks) if rank % span < stride)
        return [tuple(range(first, first + span, stride)) for first in firsts]

    def nodes(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the nodes that hold ``ranks``."""
        return tuple(sorted({rank // self.node_size for rank in ranks}))

    def crossing(self) -> frozenset[tuple[int, int]]:
        """Return the pairs of pipeline ranks that are on different nodes in some pipeline."""
        of_pipelines = ([rank // self.node_size for rank in ranks] for ranks in self.groups("pipeline"))
        # Pipelines that change nodes after the same ranks are alike.
        alike = {tuple(accumulate((a != b for a, b in pairwise(nodes)), initial=0)) for nodes in of_pipelines}
        ranks = range(self.sizes["pipeline"])
        return frozenset((a, b) for a, b in permutations(ranks, 2) if any(nodes[a] != nodes[b] for nodes in alike))

    def pipeline_rank(self, rank: int) -> tuple[int, ...]:
        """Return the global ranks at pipeline rank ``rank``: replicas and tensor-parallel parts of the same layers."""
        stride, span = self._strides("pipeline")
        firsts = range(rank * stride, self.num_ranks, span)
        return tuple(one for first in firsts for one in range(first, first + stride))

    def _strides(self, kind: str) -> tuple[int, int]:
        """Return the distance between adjacent ranks of a group, and the distance from its first to past its last."""
        sizes = self.sizes if kind in self.sizes else self.expert_sizes
        stride = math.prod(list(sizes.values())[: list(sizes).index(kind)])
        return stride, stride * sizes[kind]

    def text(self) -> str:
        """Format one line per kind of group that has more than one rank."""
        head = " x ".join(f"{kind} {size}" for kind, size in self.sizes.items() if kind != "context" or size > 1)
        num_nodes = len(self.nodes(range(self.num_ranks)))
        nodes = "1 node" if num_nodes == 1 else f"{num_nodes} nodes"
        lines = [f"{nodes} x {self.node_size} processes = {self.num_ranks} ranks: {head}"]
        for kind in self.kinds:
            groups = self.groups(kind)
            if len(groups[0]) == 1:
                continue
            most = max(len(self.nodes(group)) for group in groups)
            where = "each on one node" if most == 1 else f"each on up to {most} nodes"
            lines.append(f"{kind:14}{len(groups):4} groups of {len(groups[0]):<4} {where:24}{_listed(groups)}")
        return "\n".join(lines) + "\n"

    def warning(self) -> str:
        """Return a warning if a tensor-parallel group spans several nodes, else an empty string."""
        for group in self.groups("tensor"):
            nodes = self.nodes(group)
            if len(nodes) > 1:
                return (
                    "warning: the ranks of a tensor-parallel group exchange activations in every layer and should be "
                    f"on one node; got ranks {show(group)} on nodes {show(nodes)}; make the number of processes per "
                    f"node, {self.node_size}, a multiple of --tensor-model-parallel-size, {len(group)}\n"
                )
        return ""


def _far(data_kind: str, data: int, pipeline: int, pipeline_first: bool) -> dict[str, int]:
    sizes = {data_kind: data, "pipeline": pipeline}
    return dict(reversed(sizes.items())) if pipeline_first else sizes


def show(numbers: Sequence[int]) -> str:
    """Format consecutive numbers as ``0-7``, others as ``0,8,16``, and many as ``0,8..120``."""
    numbers = tuple(numbers)
    if len(numbers) > 1 and numbers == tuple(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers)) if len(numbers) <= 8 else f"{numbers[0]},{numbers[1]}..{numbers[-1]}"


def _listed(groups: Sequence[tuple[int, ...]]) -> str:
    """List as many groups as fit in a line, and the last one."""
    shown = [show(group) for group in groups]
    if len("  ".join(shown)) > _SHOWN:
        while len("  ".join(shown)) > _SHOWN - 20 and len(shown) > 1:
            shown.pop()
        shown += ["...", show(groups[-1])]
    return "  ".join(shown)
