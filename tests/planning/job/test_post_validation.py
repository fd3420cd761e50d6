"""Tests of the sentence on what post-validation gains."""

from __future__ import annotations

import pytest

from megatron.zero_bubble import PassCosts, build, simulate
from megatron.zero_bubble.core.ir.vocabulary import Algorithm
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig
from megatron.zero_bubble.planning.job.post_validation import forecast, planned_gain


@pytest.mark.parametrize("algorithm", [None, 1, 2])
def test_gain_is_forecast_with_and_without_a_divided_vocabulary(algorithm: Algorithm | None) -> None:
    source = ZeroBubbleConfig("zb-h2", vocabulary=algorithm).sources()(4)
    assert forecast(source, 8).startswith("post-validation under zb-h2: ")


GAINING = "zb-h2, zb-v and zb-auto with more than 1p of memory"


@pytest.mark.parametrize(
    ("config", "num_microbatches", "advice"),
    [
        (ZeroBubbleConfig("zb-h1"), 8, f"{GAINING} gain"),
        (ZeroBubbleConfig("zb-h2", vocabulary=2), 8, f"{GAINING}, without --zero-bubble-vocabulary-parallel 2, gain"),
        (ZeroBubbleConfig("zb-v", vocabulary=1), 8, f"{GAINING}, without --zero-bubble-vocabulary-parallel 1, gain"),
        (ZeroBubbleConfig("seq-1f1b", num_slices=2), 8, f"{GAINING}, without --zero-bubble-slices 2, gain"),
        (ZeroBubbleConfig("zb-h2"), 1, "drop --zero-bubble-post-validation"),
        (ZeroBubbleConfig("zb-v"), 1, "drop --zero-bubble-post-validation"),
    ],
)
def test_advice_is_another_schedule_that_gains(config: ZeroBubbleConfig, num_microbatches: int, advice: str) -> None:
    sentence = forecast(config.sources()(4), num_microbatches)
    assert ": no gain, because" in sentence
    assert sentence.endswith(f"; {advice}")


def test_advice_for_a_plan_of_zb_auto_does_not_name_it() -> None:
    schedule = build("1f1b", num_ranks=4, num_microbatches=8)
    sentence = planned_gain(simulate(schedule, PassCosts.uniform(schedule.placement, 1.0, 1.0, 1.0)))
    assert sentence.endswith("the optimizer step with and without it; zb-h2 and zb-v gain")
