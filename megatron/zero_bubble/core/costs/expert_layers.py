"""The shapes of layers with experts: how many experts process a token, and over which links its states travel.

All experts are assumed to get equally many tokens. A rank sends the hidden states of each of its tokens, in 16 bits, to
the ranks of the experts that process it (dispatch), and gets as many back (combine); F and B do so once each. Only the
copies for other ranks take time: those within a node at the bandwidth of its links, the others at that of the network,
both at the same time. Before and after each, its rows are put into another order, at memory bandwidth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.zero_bubble.core.costs.devices import Device
from megatron.zero_bubble.core.costs.kept import IN_16_BITS, MOE, MOE_ACTIVATION, Kept, Tensor, operand
from megatron.zero_bubble.core.costs.layer_work import LayerWork

CONTENTION = 132 / 112
"""By how much longer computation is assumed to take next to an all-to-all: as in DeepSeek-V3's public trace, in which
all-to-alls occupy 20 of 132 multiprocessors."""


@dataclass(frozen=True)
class Experts:
    """The experts of the layers of a model.

    Attributes:
        count: experts of a layer.
        top_k: experts that process a token.
        ffn: width of an expert.
        shared: width of the shared experts together, which process every token.
        parallel: ranks that divide the experts of a layer among them.
        tensor_parallel: ranks that divide an expert.
        gathers: whether every rank gets all tokens of these ranks (Megatron's allgather dispatcher).
        sends_once: whether a token goes once to each rank and to each node, however many of its experts are there (the
            flex dispatcher, with DeepEP or HybridEP).
        layers: which layers have experts, in model order; empty for all.
        fused: whether the products, the activation between them and the quantization of what it makes are one operation
            (``--use-transformer-engine-op-fuser``).
        groups, group_top_k: groups of experts, and those of them that a token's experts are from.
        latent: width of the states that experts take and give (``--moe-latent-size``), between two projections on the
            rank of a token; None for hidden states.
    """

    count: int
    top_k: int
    ffn: int
    shared: int = 0
    parallel: int = 1
    tensor_parallel: int = 1
    gathers: bool = False
    sends_once: bool = False
    layers: tuple[bool, ...] = ()
    fused: bool = False
    groups: int = 1
    group_top_k: int = 1
    latent: int | None = None

    def ranks_on_node(self, device: Device) -> int:
        """Ranks of an expert-parallel group that share fast links; those that divide an expert are adjacent."""
        return max(1, min(self.parallel, device.domain // self.tensor_parallel))

    def rank_weights(self, hidden: int, gated: bool) -> float:
        """Number of weights of a rank in the experts of a layer, without the shared ones and the router."""
        each = (3 if gated else 2) * self.width(hidden) * self.ffn
        return self.count * each / (self.parallel * self.tensor_parallel)

    def other_weights(self, hidden: int, gated: bool, tensor_parallel: int) -> float:
        """Number of weights of a rank in the shared experts, and in the router and the projections of latent experts,
        which every rank has as a whole.
        """
        of_all = hidden * (self.count + 2 * (self.latent or 0))
        return (3 if gated else 2) * hidden * self.shared / tensor_parallel + of_all

    def width(self, hidden: int) -> int:
        """Features of the states that experts take and give."""
        return self.latent or hidden

    def all_to_all_ms(self, states: float, device: Device) -> float:
        """Milliseconds of a dispatch, or of a combine.

        Args:
            states: bytes of the states of a rank's tokens that experts take.
        """
        near = self.ranks_on_node(device)
        far = self.parallel - near
        copies = 1.0 if self.gathers else self._copies(self.parallel)  # for each rank of the group
        away = copies * far
        if self.sends_once and far:
            away = self._copies(self.parallel / near) * far / near  # for each node
        sent = (copies * (near - 1) / device.node_gbs, away / device.network_gbs)
        return device.pace * states / 1e6 * max(sent)

    def _copies(self, places: float) -> float:
        """Copies of a token for each of so many places that have equally many experts, in the order of their groups."""
        if not self.sends_once:
            return self.top_k / places
        of_group = _reached(max(1.0, places / self.groups), self.top_k / self.group_top_k)
        return min(_reached(places, self.top_k), self.group_top_k / min(places, self.groups) * of_group)

    def assumed(self, device: Device) -> str:
        """A sentence with what the estimate assumes."""
        text = f"Experts are assumed to be balanced: {self.top_k} of {self.count} process each token"
        if self.parallel == 1:
            return f"{text}."
        near = self.ranks_on_node(device)
        rates = f"{device.node_gbs:g} GB/s within a node"
        rates += f" and {device.network_gbs:g} GB/s between nodes" if near < self.parallel else ""
        return f"{text}. The all-to-alls of {self.parallel} expert-parallel ranks, {near} per node, run at {rates}."

    def routed(
        self, tokens: int, hidden: int, split: int, whole: int, gated: bool, kept: Kept = IN_16_BITS
    ) -> LayerWork:
        """What the experts of a layer take, without the shared ones.

        Args:
            tokens: tokens of a microbatch.
            split, whole: the number of ranks that divide a layer of the model, and the hidden states.
            kept: what decides which tensors are kept.
        """
        own, projections = self.width(hidden), 4.0 * tokens * hidden * (self.latent or 0)
        grouped = 2.0 * tokens * self.top_k * (3 if gated else 2) * own * self.ffn
        matrices = grouped + projections
        again = matrices if kept.repeats(MOE) else 0.0
        rows = tokens / whole * self.top_k * self.tensor_parallel  # of a rank, for its part of an expert
        ffn, wide = self.ffn / self.tensor_parallel, self.ffn * (2 if gated else 1) / self.tensor_parallel
        tensors = [  # in bf16
            operand(2 * rows * own, MOE),
            *([operand(2.0 * tokens / whole * each, MOE) for each in (hidden, own)] if self.latent else ()),
            Tensor(2 * rows * wide, (MOE,)),
            operand(2 * rows * ffn, MOE, MOE_ACTIVATION),
        ]
        # W takes the rows and the gradients of its outputs.
        inside = rows * 2 * (wide + ffn) * kept.operand_share
        for_wgrad = rows * 4 * own * kept.operand_share + inside
        for_wgrad += 4.0 * tokens / whole * (hidden + own) * kept.operand_share if self.latent else 0.0
        moved, stored, dropped = kept.of(tensors)
        permuted = 2.0 * rows * own * 2 * self._permutations
        return LayerWork(
            matrices,
            matrices + again,
            matrices,
            0.0 if self.fused else moved,
            stored,
            for_wgrad,
            moved_again=0.0 if self.fused else dropped,
            linear=matrices,
            repeated=again,
            permuted=permuted,
            permuted_again=permuted if again else 0.0,
            quantized_inside=inside if self.fused else 0.0,
            products=1 if self.fused else 2 * self.count / self.parallel,
            grouped=grouped,
        )

    @property
    def _permutations(self) -> int:
        """How often rows are read and written in another order, in each of F and B: for the dispatch and after the
        combine, and by expert at their rank, unless it has only one or the kernels of an all-to-all sort them (flex).
        """
        sorts = self.parallel < self.count and not (self.sends_once or self.gathers)
        return 4 if sorts else 2

    def scores(self, tokens: int, hidden: int, whole: int, kept: Kept = IN_16_BITS) -> LayerWork:
        """What the router of a layer takes: a product, and its scores in 32 bits, before and after the softmax."""
        operations = 2.0 * tokens * hidden * self.count
        again = operations if kept.repeats(MOE) else 0.0
        moved, stored, dropped = kept.of([Tensor(8.0 * tokens / whole * self.count, (MOE,))])
        return LayerWork(operations, 2 * operations + again, 0.0, moved, stored, 0.0, moved_again=dropped)


def _reached(places: float, tries: float) -> float:
    """The share of places that so many experts of a token reach, each in any of them."""
    return 1.0 - math.pow(1.0 - 1.0 / places, tries)
