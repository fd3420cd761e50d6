"""Choose how to cut sequences: a given number of slices and given cuts, or those with the shortest schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.zero_bubble.core.costs import PassCosts
from megatron.zero_bubble.core.costs.cuts import balanced, default_cuts
from megatron.zero_bubble.core.costs.units import checked_share
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Placement, Slices
from megatron.zero_bubble.planning import setup
from megatron.zero_bubble.planning.figures import Figures

LEAST_TOKENS = 1024
"""The fewest tokens of a slice that is chosen automatically, if neither the user nor a run gives a number."""
_MOST_SLICES = 16
"""The most slices that are tried if the length of a sequence is unknown."""


@dataclass(frozen=True)
class Cuts:
    """How to cut sequences.

    Attributes:
        number: the number of slices; None to choose it.
        places: ``even`` or ``balanced`` cuts, or the slices themselves; None for the default: the better of both if the
            number is to be chosen, else balanced cuts if attention takes much of the time (``default_cuts``).
        least_tokens: the fewest tokens of a slice if the number is to be chosen; it needs a known sequence length. The
            default is what a run has measured, else ``LEAST_TOKENS``.
    """

    number: int | None
    places: Literal["even", "balanced"] | Slices | None = None
    least_tokens: int | None = None

    def candidates(self, costs: Figures) -> tuple[Slices, ...]:
        """Return the slices to choose from, the fewest first; only one if neither number nor places are open.

        Raises:
            UserError: for more slices than tokens, or a minimum of tokens without a known sequence length.
        """
        on = costs.on(Placement.linear(costs.num_ranks))[0]
        if isinstance(self.places, Slices):
            found = [self.places]
        elif self.number is not None:
            make = {"even": lambda _, number: Slices.even(number), "balanced": balanced, None: default_cuts}[
                self.places
            ]
            found = [make(on, self.number)]
        else:
            found = [*self._powers_of_two(costs)]
            cuts = [] if self.places == "even" else [balanced(on, len(slices)) for slices in found]
            found = sorted({*(found if self.places != "balanced" else ()), *cuts}, key=_order)
            found = [slices for slices in found if self._is_long_enough(slices, costs)]
        if costs.sequence is not None:
            for slices in found:
                slices.in_tokens(costs.sequence)
        return tuple(found)

    def _powers_of_two(self, costs: Figures) -> Sequence[Slices]:
        if costs.sequence is None and self.least_tokens is not None:
            raise UserError(
                f"a minimum of {self.least_tokens} tokens per slice needs the length of a sequence, which only "
                "--config or a costs file with sequence_length gives; leave out --min-slice-tokens, or give the number "
                "of slices"
            )
        most = _MOST_SLICES if costs.sequence is None else max(1, costs.sequence // self._least(costs))
        return [Slices.even(2**power) for power in range(most.bit_length())]

    def _is_long_enough(self, slices: Slices, costs: Figures) -> bool:
        if costs.sequence is None or len(slices) == 1:
            return True
        return min(slices.shares) * costs.sequence >= self._least(costs) - 0.5

    def _least(self, costs: Figures) -> int:
        return self.least_tokens or costs.least_slice_tokens or LEAST_TOKENS


def _order(slices: Slices) -> tuple[int, bool, tuple[float, ...]]:
    return len(slices), not slices.are_even, slices.shares


def slices_of(cuts: setup.Cuts | None) -> Slices | None:
    """The slices of a run; None for the schedule's default.

    Raises:
        UserError: fewer than one slice, ends that do not increase, or a share that is not between 0 and 1.
    """
    if cuts is None:
        return None
    if isinstance(cuts.places, tuple):
        return Slices.of_tokens(tuple(map(int, cuts.places)))
    assert isinstance(cuts.number, int) and cuts.places != "balanced", "a run has numbers to cut by"
    if not isinstance(cuts.places, float):
        return Slices.even(cuts.number)
    share = checked_share("attention_share", cuts.places)
    # A product of matrices takes equally long in F, B and W, and attention twice as long in B as in F.
    costs = PassCosts.uniform(Placement.linear(1), 1.0, 1.0 + share, 1.0 - share, attention=share)
    return balanced(costs, cuts.number)
