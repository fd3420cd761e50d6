"""Tests of which values of ``ZeroBubbleConfig`` can be combined."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.zero_bubble.job.config import ZeroBubbleConfig


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"memory_limit": "0.25p"}, "memory_limit='0.25p' applies only to zb-auto, .* fixed peak; leave it out"),
        ({"placement": "vee"}, "placement='vee' applies only to zb-auto"),
        ({"rollback": "inverse"}, "rollback='inverse' has no effect without post_validation"),
    ],
)
def test_options_without_effect_are_rejected(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ZeroBubbleConfig("zb-h1", **options)
