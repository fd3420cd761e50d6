"""Which values of ``ZeroBubbleConfig`` go together."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.zero_bubble.job.config import ZeroBubbleConfig


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"memory_limit": "0.25p"}, "the memory limit '0.25p' is for zb-auto; other schedules .* leave it out"),
        ({"placement": "vee"}, "the placement 'vee' is for zb-auto"),
        ({"rollback": "inverse"}, "the rollback 'inverse' is for post_validation, which is not asked for"),
    ],
)
def test_options_of_another_configuration(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ZeroBubbleConfig("zb-h1", **options)
