"""Memory of a microbatch on each stage."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.zero_bubble.core.costs.terms import fitted, settle
from megatron.zero_bubble.core.costs.units import refuse_huge, spread
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import WHOLE, Pass, Placement, Slices, Value
from megatron.zero_bubble.core.ir.flow import OPERANDS, SAVED
from megatron.zero_bubble.core.ir.passes import BW, VOCABULARY_KINDS, B, F, R, S, T, W

MOST_SUMMED_AS_THEY_ARE = 8
"""Most slices whose gradients of keys and values are summed in their own dtype; with more slices, in float32."""


@dataclass(frozen=True)
class PassMemory:
    """Memory of one microbatch on every stage, in one unit (bytes, or parts of a microbatch).

    F adds ``activation`` at its start, the end of B leaves ``wgrad`` for W, and the end of W (or BW) leaves nothing:
    M_B and M_W of the Zero Bubble paper (arXiv 2401.10241, section 2). With sequence slices, each slice has its tokens'
    share of both.

    Attributes:
        activation: what F saves, M_B.
        wgrad: what B keeps for W, M_W.
        history: the keys and values of a microbatch (default: 0), which count only with slices. They are in buffers
            for the whole sequence, which the F of the first slice allocates and the B of the first slice frees; the B
            of the last slice allocates as much for their gradients, or twice as much where 16-bit gradients are summed
            in float32 (``MOST_SUMMED_AS_THEY_ARE``).
        states: what the recurrent layers of a slice hand to the next one (default: 0), which counts only with slices. F
            leaves it for the B of the same slice, and the B of the next slice leaves as much for it, the gradient.
        logits: what S of vocabulary parallelism saves for its T, per rank; empty without vocabulary parallelism.
        captured: of ``activation`` and of ``wgrad``, what is in the memory of CUDA graphs (default: 0). They keep it
            from F until the end of W, and then for other microbatches.
        rebuilt: what R adds at its start to ``activation``, and the end of B frees (default: 0). A B that computes
            activations again itself does so layer by layer.
        apart: the (stage, microbatch, slice) that have an R.
        recomputed: whether ``activation`` lacks the keys and values, because B repeats what makes them.

    Raises:
        UserError: for a negative or non-finite figure, an ``activation`` of zero, or lists of different lengths.
    """

    activation: tuple[float, ...]
    wgrad: tuple[float, ...]
    history: tuple[float, ...] = ()
    recomputed: bool = False
    logits: tuple[float, ...] = ()
    captured: tuple[float, ...] = ()
    rebuilt: tuple[float, ...] = ()
    apart: frozenset[tuple[int, int, int]] = frozenset()
    states: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        settle(self, "memory")
        if 0.0 in self.activation:
            raise UserError("activation memory must be above 0, because it is the unit of peaks; got 0; give its size")
        for stage, (captured, *kept) in enumerate(zip(self.captured, self.activation, self.wgrad, strict=True)):
            if captured > min(kept):
                raise UserError(
                    f"captured must be a part of activation and of wgrad; got {captured:g} of {kept[0]:g} and "
                    f"{kept[1]:g} on stage {stage}; give no more than the smaller one"
                )

    @classmethod
    def uniform(cls, placement: Placement, activation: float = 1.0, wgrad: float | None = None) -> PassMemory:
        """Use the same memory on every rank; by default ``wgrad`` is ``activation``, its largest possible value.

        The default is one microbatch per rank, so that memory counts in microbatches.

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
        return replace(self, **fitted(self, "memory", placement.num_stages))

    def recomputing(self, apart: frozenset[tuple[int, int, int]]) -> PassMemory:
        """Return the memory of a schedule with an R for each of these (stage, microbatch, slice)."""
        return self if self.apart == apart else replace(self, apart=apart)

    def size(self, value: Value, slices: Slices = WHOLE) -> float:
        """Memory of ``value`` on its rank, in the unit of these figures; messages under way are not counted."""
        producer = value.producer
        if producer.kind in VOCABULARY_KINDS:
            return self.logits[producer.stage] if self.logits and (value.name, producer.kind) == (SAVED, S) else 0.0
        figures = {SAVED: self.activation, OPERANDS: self.wgrad}.get(value.name)
        if figures is None:
            return 0.0
        # The slices of a microbatch share the buffers of keys and values, so these belong to none of them.
        shared = 0.0 if value.name != SAVED or len(slices) == 1 or self.recomputed else self.history[producer.stage]
        return (figures[producer.stage] - shared) * slices.shares[producer.slice]

    def changes(self, p: Pass, slices: Slices = WHOLE) -> tuple[float, float]:
        """The changes of memory by ``p`` at its start and at its end, in the unit of these figures."""
        if p.kind in VOCABULARY_KINDS:
            saved = self.logits[p.stage] if self.logits and p.kind in (S, T) else 0.0
            return (saved, 0.0) if p.kind is S else (0.0, -saved)
        if p.kind is W:
            return 0.0, -self.wgrad[p.stage] * slices.shares[p.slice]
        if p.kind is R:
            return self.rebuilt[p.stage] * slices.shares[p.slice], 0.0
        at_start, at_end = self._changes_of_tokens(p, slices)
        before, after = (self.states[p.stage] * (0 <= at < len(slices) - 1) for at in (p.slice - 1, p.slice))
        if p.kind is F:
            return at_start + after, at_end
        return at_start, at_end + before - 2 * after  # the gradient for the state before, and both that are after

    def _changes_of_tokens(self, p: Pass, slices: Slices) -> tuple[float, float]:
        """Those by F, B or BW without states."""
        share = slices.shares[p.slice]
        activation = self.activation[p.stage] * share
        left = self.wgrad[p.stage] * share if p.kind is B else 0.0
        if self.apart and p.kind is not F and (p.stage, p.microbatch, p.slice) in self.apart:
            left -= self.rebuilt[p.stage] * share
        if len(slices) == 1 or not (history := self.history[p.stage]):
            return (activation, 0.0) if p.kind is F else (0.0, left - activation)
        # The rows of this slice are part of its activation, but the buffers are allocated and freed as a whole.
        rows = 0.0 if self.recomputed else history * share
        if p.kind is F:
            return activation - rows + (0.0 if p.slice else history), 0.0
        gradients = self.history_gradients(p.stage, slices)
        freed = 0.0 if p.slice else history + gradients
        return gradients if p.slice == len(slices) - 1 else 0.0, left - activation + rows - freed

    def captured_changes(self, p: Pass) -> tuple[float, float]:
        """The part of ``changes`` that is in the memory of CUDA graphs; jobs with these have whole sequences."""
        if p.kind is F:
            return self.captured[p.stage], 0.0
        return 0.0, -self.captured[p.stage] if p.kind in (W, BW) else 0.0

    def history_gradients(self, stage: int, slices: Slices) -> float:
        """Memory of the gradients of a microbatch's keys and values, in the unit of these figures."""
        return 0.0 if len(slices) == 1 else self.history[stage] * (2 if len(slices) > MOST_SUMMED_AS_THEY_ARE else 1)
