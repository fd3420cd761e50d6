"""Memory of a microbatch on each stage."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.zero_bubble.costs.units import check_same_length, checked_figures, recut, refuse_huge, spread
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.ir import Pass, Placement, Value
from megatron.zero_bubble.ir.flow import OPERANDS, SAVED
from megatron.zero_bubble.ir.passes import B, F, W

MEMORY = ("activation", "wgrad")


@dataclass(frozen=True)
class PassMemory:
    """Memory of one microbatch on every stage, in one unit (bytes, or parts of a microbatch).

    F adds ``activation`` at its start, the end of B leaves ``wgrad`` for W, and the end of W (or BW) leaves nothing:
    M_B and M_W of the Zero Bubble paper (arXiv 2401.10241, section 2).

    Raises:
        UserError: for a negative or non-finite figure, an ``activation`` of zero, or lists of different lengths.
    """

    activation: tuple[float, ...]
    wgrad: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in MEMORY:
            object.__setattr__(self, name, checked_figures(name, getattr(self, name)))
        check_same_length(self, MEMORY)
        if 0.0 in self.activation:
            raise UserError("activation memory must be above 0, because it is the unit of peaks; got 0; give its size")

    @classmethod
    def uniform(cls, placement: Placement, activation: float = 1.0, wgrad: float | None = None) -> PassMemory:
        """Use the same memory on every rank; by default ``wgrad`` is ``activation``, its largest possible value.

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
        """Convert to the stages of ``placement`` for the same model, as ``PassCosts.fit`` does."""
        return PassMemory(*(recut(getattr(self, name), placement.num_stages) for name in MEMORY))

    def size(self, value: Value, num_slices: int = 1) -> float:
        """Memory of ``value`` on the rank that has it; activations and gradients in transit are not counted."""
        figures = {SAVED: self.activation, OPERANDS: self.wgrad}.get(value.name)
        return 0.0 if figures is None else figures[value.producer.stage] / num_slices

    def delta(self, p: Pass, num_slices: int = 1) -> float:
        """The change of memory by ``p``: at the start of an F, and at the end of other passes."""
        activation, wgrad = self.activation[p.stage] / num_slices, self.wgrad[p.stage] / num_slices
        if p.kind is F:
            return activation
        if p.kind is B:
            return wgrad - activation
        return -wgrad if p.kind is W else -activation
