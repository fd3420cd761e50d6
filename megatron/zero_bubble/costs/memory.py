"""What a microbatch keeps on each stage."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.zero_bubble.costs.units import check_same_length, checked_figures, recut, refuse_huge, spread
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.ir import Kind, Pass, Placement, Value
from megatron.zero_bubble.ir.flow import OPERANDS, SAVED

MEMORY = ("activation", "wgrad")


@dataclass(frozen=True)
class PassMemory:
    """What one microbatch keeps on every stage, in any one unit (bytes, or parts of a microbatch).

    F adds ``activation`` at its start, the end of B leaves ``wgrad`` for W, the end of W (or of BW) leaves nothing:
    the Zero Bubble paper's M_B and M_W (arXiv 2401.10241, section 2).

    Raises:
        UserError: for a figure that is negative or not finite, an ``activation`` of zero, or lists of two lengths.
    """

    activation: tuple[float, ...]
    wgrad: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in MEMORY:
            object.__setattr__(self, name, checked_figures(name, getattr(self, name)))
        check_same_length(self, MEMORY)
        if 0.0 in self.activation:
            raise UserError("activation memory must be above 0, because peaks are counted in units of it; got 0")

    @classmethod
    def uniform(cls, placement: Placement, activation: float = 1.0, wgrad: float | None = None) -> PassMemory:
        """Every rank keeps the same; ``wgrad`` is ``activation`` unless given, the most that W may have to keep.

        Raises:
            UserError: also for a figure above ``MAX_FIGURE``.
        """
        kept = activation if wgrad is None else wgrad
        refuse_huge(activation=activation, wgrad=kept)
        return cls(spread(placement, activation), spread(placement, kept))

    @property
    def num_stages(self) -> int:
        return len(self.activation)

    def fit(self, placement: Placement) -> PassMemory:
        """The same model cut into the stages of ``placement``, as ``PassCosts.fit`` does."""
        return PassMemory(*(recut(getattr(self, name), placement.num_stages) for name in MEMORY))

    def size(self, value: Value, num_slices: int = 1) -> float:
        """What ``value`` occupies on the rank that has it; activations and gradients under way are not counted."""
        figures = {SAVED: self.activation, OPERANDS: self.wgrad}.get(value.name)
        return 0.0 if figures is None else figures[value.producer.stage] / num_slices

    def delta(self, p: Pass, num_slices: int = 1) -> float:
        """By how much ``p`` changes what its stage keeps; F's part is due at its start, the others' at their end."""
        activation, wgrad = self.activation[p.stage] / num_slices, self.wgrad[p.stage] / num_slices
        if p.kind is Kind.F:
            return activation
        if p.kind is Kind.B:
            return wgrad - activation
        return -wgrad if p.kind is Kind.W else -activation
