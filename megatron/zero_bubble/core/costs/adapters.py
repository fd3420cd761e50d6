"""What adapters change: low-rank matrices are trained next to frozen linear layers (LoRA, arXiv 2106.09685).

Frozen weights have no W. An adapter of a layer with ``n`` inputs and ``m`` outputs has ``rank * (n + m)`` weights,
whose products F, B and W have like those of any other; its W takes the inputs of the layer and the gradients of its
outputs. The embedding, the norms, the router and the output layer are frozen, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron.zero_bubble.core.costs.layer_work import LayerWork

LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""The linear layers that have adapters by default."""
_LATENT = ("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj")
TARGETS = (*LINEARS, *_LATENT, "in_proj", "out_proj")
"""All that can have them; the last two are those of Mamba layers and of gated delta nets."""


class Linear(NamedTuple):
    """A linear layer: its name in megatron-core, and its numbers of inputs and of outputs."""

    name: str
    inputs: int
    outputs: int


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model.

    Attributes:
        rank: of each.
        targets: the names of linear layers that have one.
    """

    rank: int
    targets: tuple[str, ...] = LINEARS

    def __str__(self) -> str:
        return f"adapters of rank {self.rank} in {', '.join(self.targets)}"

    def weights(self, linears: Sequence[Linear]) -> int:
        """Number of weights."""
        return sum(self.rank * (each.inputs + each.outputs) for each in self._targeted(linears))

    def added_to(self, work: LayerWork, linears: Sequence[Linear], tokens: float) -> LayerWork:
        """What a part of a layer takes with adapters, and without the W of its linear layers.

        Args:
            tokens: those that its linear layers compute, such as rows of experts, on all ranks that divide them.
        """
        more = 2.0 * tokens * self.weights(linears)
        whole = sum(each.inputs + each.outputs for each in linears)
        kept = sum(each.inputs + each.outputs + 2 * self.rank for each in self._targeted(linears))
        return replace(
            work,
            forward=work.forward + more,
            backward=work.backward + more,
            wgrad=more,
            kept_for_wgrad=work.kept_for_wgrad * min(1.0, kept / whole) if linears else 0.0,
            frozen=work.linear,
        )

    def _targeted(self, linears: Sequence[Linear]) -> Iterable[Linear]:
        return (each for each in linears if each.name in self.targets)
