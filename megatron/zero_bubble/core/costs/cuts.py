"""Where to cut sequences into slices."""

from __future__ import annotations

from itertools import pairwise
from math import sqrt

from megatron.zero_bubble.core.costs.passes import PassCosts
from megatron.zero_bubble.core.ir import Slices

ATTENTION_TO_BALANCE = 0.1
"""The share of attention in F and B above which balanced cuts are the default: below it, their bubble is less than a
point smaller, and their longest slice needs more memory."""


def balanced(costs: PassCosts, num_slices: int) -> Slices:
    """Cut such that all slices take equal time for F, B and W of all stages together.

    The slices up to x take ``linear * x + attention * x^2``, which is solved for equal parts.

    Raises:
        UserError: as ``Slices.even``.
    """
    even = Slices.even(num_slices)
    attention = _attention_ms(costs)
    linear = _whole_ms(costs) - attention
    if attention <= 1e-9 * linear or num_slices == 1:
        return even
    parts = ((linear + attention) * k / num_slices for k in range(num_slices + 1))
    ends = [(sqrt(linear * linear + 4 * attention * part) - linear) / (2 * attention) for part in parts]
    return Slices(tuple(end - start for start, end in pairwise(ends)))


def default_cuts(costs: PassCosts, num_slices: int) -> Slices:
    """Balanced cuts if attention takes more than ``ATTENTION_TO_BALANCE`` of F and B, else even ones."""
    of_both = sum(costs.forward_ms) + sum(costs.backward_ms)
    is_long = _attention_ms(costs) > ATTENTION_TO_BALANCE * of_both
    return balanced(costs, num_slices) if is_long else Slices.even(num_slices)


def _attention_ms(costs: PassCosts) -> float:
    times = zip(
        (*costs.forward_ms, *costs.backward_ms), (*costs.forward_attention, *costs.backward_attention), strict=True
    )
    return sum(ms * share for ms, share in times)


def _whole_ms(costs: PassCosts) -> float:
    return sum(costs.forward_ms) + sum(costs.backward_ms) + sum(costs.wgrad_ms)
