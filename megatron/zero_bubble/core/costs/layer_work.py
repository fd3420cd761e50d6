"""What one layer takes, before a device is known: operations and bytes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class LayerWork:
    """One layer, or the output layer, for one microbatch.

    Attributes:
        forward, backward, wgrad: floating-point operations of F, B and W.
        moved: bytes that element-wise kernels move in one sweep.
        activation, kept_for_wgrad: bytes that F stores, and that B leaves to W.
        forward_scores, backward_scores: of the operations of F and B, those for attention scores.
        history: bytes of keys and values.
        states: bytes of what a slice hands to the next one, besides.
        moved_again: bytes that B moves in one sweep, to compute again what selective recomputation drops.
        linear: of the operations of each of F, B and W, those of linear layers.
        reductions: how often F, and B as well, adds its hidden states over tensor-parallel ranks.
        frozen: operations of ``linear`` that W does not have, because weights are not trained.
        repeated: operations of linear layers that B computes again, by selective recomputation.
        permuted, permuted_again: bytes that permutations of tokens move in each of F and B, and that B moves to repeat
            those of F.
        quantized_inside: of ``operands``, the bytes that products quantize themselves.
        products, grouped: the products of experts in each of F, B and W, and the operations of all of them.
        captured: of ``activation`` and of ``kept_for_wgrad``, the bytes in memory of CUDA graphs.
        other_operands: bytes of operands of weight gradients that are not in ``kept_for_wgrad`` as such.
        rebuilt: bytes that full recomputation leaves in addition to ``activation``.
        is_recomputed: whether full recomputation repeats F in B.
    """

    forward: float
    backward: float
    wgrad: float
    moved: float
    activation: float
    kept_for_wgrad: float
    forward_scores: float = 0.0
    backward_scores: float = 0.0
    history: float = 0.0
    states: float = 0.0
    moved_again: float = 0.0
    linear: float = 0.0
    frozen: float = 0.0
    repeated: float = 0.0
    permuted: float = 0.0
    permuted_again: float = 0.0
    quantized_inside: float = 0.0
    products: float = 0.0
    grouped: float = 0.0
    reductions: int = 0
    captured: float = 0.0
    other_operands: float = 0.0
    rebuilt: float = 0.0
    is_recomputed: bool = True

    def __add__(self, other: LayerWork) -> LayerWork:
        """Both together, as one layer; each must be recomputed if the other is."""
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in _AMOUNTS})

    @property
    def operands(self) -> float:
        """Bytes of the operands of weight gradients."""
        return self.kept_for_wgrad - self.captured + self.other_operands

    def without_w(self) -> LayerWork:
        """The same layer with its weight gradients in B."""
        backward = self.backward + self.wgrad
        return replace(self, backward=backward, wgrad=0.0, kept_for_wgrad=0.0, other_operands=self.operands)

    def in_graphs(self) -> LayerWork:
        """The same layer inside CUDA graphs, which keep the memory of a microbatch until its W."""
        slot = max(self.activation, self.kept_for_wgrad)
        return replace(self, activation=slot, kept_for_wgrad=slot, captured=slot, other_operands=self.operands)


_AMOUNTS = [field.name for field in fields(LayerWork) if field.name != "is_recomputed"]
