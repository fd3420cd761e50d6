"""Tests of the sentence on what post-validation gains."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.ir.vocabulary import Algorithm
from megatron.zero_bubble.job.config import ZeroBubbleConfig
from megatron.zero_bubble.job.post_validation import forecast


@pytest.mark.parametrize("algorithm", [None, 1, 2])
def test_gain_is_forecast_with_and_without_a_divided_vocabulary(algorithm: Algorithm | None) -> None:
    source = ZeroBubbleConfig("zb-h2", vocabulary=algorithm).sources()(4)
    assert forecast(source, 8).startswith("post-validation under zb-h2: ")
