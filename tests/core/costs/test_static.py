"""Memory that does not depend on microbatches, and its replicas."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.core.costs.static import StageBytes

EXPERTS = StageBytes((8.0, 0.0), (16.0, 0.0), (48.0, 0.0))
"""Those of two stages, of which one has experts."""


def with_experts(per_copy: float) -> StageBytes:
    return StageBytes((10.0, 4.0), (20.0, 8.0), (60.0, 24.0), EXPERTS, per_copy)


def test_experts_are_divided_by_their_own_replicas() -> None:
    sizes = with_experts(per_copy=4.0)
    assert sizes.sharded((0,), 8) == pytest.approx((2 + 4 + 12) / 8 + (8 + 16 + 48) / 2)
    assert sizes.sharded((1,), 8) == pytest.approx((4 + 8 + 24) / 8)
    assert sizes.whole((0, 1), 8) == pytest.approx(14 + 28 + (12 + 24) / 8 + 48 / 2)
    weights, gradients = sizes.sent(8)
    assert weights == pytest.approx([2 * 7 / 8 + 8 / 2, 4 * 7 / 8])
    assert gradients == pytest.approx([4 * 7 / 8 + 16 / 2, 8 * 7 / 8])
    assert sizes.shared(8) == (sizes.weights, sizes.gradients)


@pytest.mark.parametrize("per_copy", [8.0, 16.0])
def test_experts_of_one_copy_stay_whole_and_are_not_sent(per_copy: float) -> None:
    sizes = with_experts(per_copy)
    assert sizes.shared(8) == ((2.0, 4.0), (4.0, 8.0))
    assert sizes.sent(8)[0] == pytest.approx([2 * 7 / 8, 4 * 7 / 8])
    assert sizes.sharded((0,), 8) == pytest.approx((2 + 4 + 12) / 8 + 8 + 16 + 48)
    assert sizes.least_whole((0, 1), 8) == pytest.approx(sizes.sharded((0, 1), 8) + 4 + 12)


def test_copies_of_a_pipeline_are_those_of_its_experts() -> None:
    """With one replica per copy, nothing differs from a model without experts."""
    alone = StageBytes((10.0, 4.0), (20.0, 8.0), (60.0, 24.0))
    own = with_experts(per_copy=1.0)
    assert own.sharded((0, 1), 8) == pytest.approx(alone.sharded((0, 1), 8))
    assert own.sent(8)[0] == pytest.approx(alone.sent(8)[0])
    assert own.shared(8) == alone.shared(8)
