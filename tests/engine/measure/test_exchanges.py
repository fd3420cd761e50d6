"""Tests of the parts of experts in measured passes."""

from __future__ import annotations

import pytest

from megatron.zero_bubble import PassCosts, Placement
from megatron.zero_bubble.core.analysis.timeline import Span
from megatron.zero_bubble.core.analysis.trace import ExpertExchange, RankTrace, Trace
from megatron.zero_bubble.core.ir import Kind, Pass
from megatron.zero_bubble.core.ir.passes import BW, B, F, W
from megatron.zero_bubble.engine.measure.exchanges import with_exchanges

OF_F, OF_B = ("dispatch", "combine"), ("combine_grad", "dispatch_grad")


def recorded(kinds: tuple[Kind, ...], parts: dict[Kind, tuple[str, ...]], works: int = 1) -> Trace:
    """A microbatch of one stage with two layers: 10 ms per pass, each all-to-all 1 ms, and experts 1.5 ms."""
    spans, exchanges = [], []
    for number, kind in enumerate(kinds):
        work, start = Pass(0, kind, 0), 10.0 * number
        spans.append(Span(work, start, start + 10))
        for layer in range(2 if kind in parts else 0):
            for place, part in enumerate(parts[kind]):
                at = start + 5 * layer + 2.5 * place
                exchanges.append(ExpertExchange((work,) * works, part, at, at + 1))
    return Trace.of("own", (RankTrace(tuple(spans), exchanges=tuple(exchanges)),))


def costs(b: float, w: float) -> PassCosts:
    return PassCosts.uniform(Placement.linear(1), 20.0, b, w)


def test_parts_are_shares_of_the_measured_passes() -> None:
    (own,) = with_exchanges(costs(30, 10), [recorded((F, B, W), {F: OF_F, B: OF_B})]).experts
    assert own.layers == 2
    assert (own.dispatch, own.experts, own.combine) == pytest.approx((4, 6, 4))
    assert (own.combine_grad, own.experts_grad, own.dispatch_grad) == pytest.approx((6, 9, 6))
    assert own.experts_wgrad == pytest.approx(10 * 6 / 12)  # as of what F computes
    assert own.whole == pytest.approx(60)


def test_fused_backwards_and_repeated_forwards_count() -> None:
    (own,) = with_exchanges(costs(30, 0), [recorded((F, BW), {F: OF_F, BW: OF_B})]).experts
    assert own.dispatch_grad == pytest.approx(6) and own.experts_wgrad == 0
    (again,) = with_exchanges(costs(30, 0), [recorded((F, BW), {F: OF_F, BW: (*OF_F, *OF_B)})]).experts
    assert again.dispatch_grad == pytest.approx(12) and again.experts_grad == pytest.approx(18)


def test_costs_without_all_to_alls_are_unchanged() -> None:
    plain = costs(30, 10)
    assert with_exchanges(plain, [recorded((F, B, W), {})]) is plain
    assert with_exchanges(plain, [recorded((F, B, W), {F: OF_F, B: OF_B}, works=2)]) is plain  # those of pairs wait
