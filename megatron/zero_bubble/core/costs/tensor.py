"""Costs of tensor parallelism, derived from those of the same model without it.

A group of t GPUs divides every layer (Megatron-LM, arXiv 1909.08053), and what is between matrix products by sequence
parallelism (arXiv 2205.05198). Passes are estimated as 1/t of the undivided ones, which assumes that matrices 1/t as
large reach the same throughput. The hidden states of a microbatch, s b h elements, are reduced over the group twice per
layer in F and twice in B, as all-reduces or as pairs of all-gathers and reduce-scatters; full recomputation repeats
those of F in B. In each, a rank sends 2 (t-1)/t of them in BF16. All of it counts as critical path. Left out are the
latency of collectives, the embedding, the output layer, and the inputs that are gathered again for W.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.zero_bubble.core.costs.devices import Device
from megatron.zero_bubble.core.costs.estimate import estimate
from megatron.zero_bubble.core.costs.memory import PassMemory
from megatron.zero_bubble.core.costs.model import Model
from megatron.zero_bubble.core.costs.passes import PassCosts
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Placement

_FORWARD, _BACKWARD = 2, 2
"""All-reduces per layer and microbatch."""
_BF16 = 2.0


@dataclass(frozen=True)
class TensorParallelModel:
    """A model that a group of GPUs divides.

    Attributes:
        whole: the model without tensor parallelism.
        degree: the number of GPUs of a group.
    """

    whole: Model
    degree: int

    def check(self) -> None:
        """Raise UserError for a degree that does not divide the attention of the model."""
        for what, count in (("attention heads", self.whole.heads), ("query groups", self.whole.groups)):
            if count % self.degree:
                raise UserError(
                    f"tensor parallelism needs a number of {what} that it divides; got {count} for {self.degree} GPUs; "
                    "choose other --replicas"
                )

    @property
    def model(self) -> Model:
        """The part of a GPU."""
        return replace(self.whole, tensor_parallel=self.degree, sequence_parallel=True)

    @property
    def all_reduce_bytes(self) -> float:
        """Bytes that a rank sends in one all-reduce of hidden states."""
        return 2 * (self.degree - 1) / self.degree * _BF16 * self.whole.tokens * self.whole.hidden

    @property
    def all_reduces(self) -> tuple[int, int]:
        """Number of all-reduces per layer and microbatch: of F, and of B."""
        return _FORWARD, _BACKWARD + (_FORWARD if self.whole.recompute == "full" else 0)

    def sent(self, num_microbatches: int) -> float:
        """Bytes that a rank sends to its group, on the rank with most layers."""
        return sum(self.all_reduces) * self.all_reduce_bytes * max(self.whole.layers) * num_microbatches

    def costs(self, device: Device, placement: Placement, bytes_per_ms: float) -> tuple[PassCosts, PassMemory]:
        """As ``estimate``, with links between the GPUs that send so many bytes. Shares of attention are left out:
        sequences are whole.
        """
        linked = replace(device, node_gbs=bytes_per_ms / 1e6, domain=self.degree)
        costs, memory = estimate(self.model, linked, placement)
        return PassCosts(costs.forward_ms, costs.backward_ms, costs.wgrad_ms, costs.comm_ms), memory
