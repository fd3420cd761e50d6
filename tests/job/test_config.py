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
        ({"host_memory": "1GiB"}, "host_memory=1GiB with offload=none, which moves nothing; leave it out, or give"),
        ({"offload": "some"}, "the share to offload is all, none or a percentage up to 100%"),
        ({"offload": "all", "host_memory": "2p"}, "an amount of memory is written like 60GiB; got '2p'"),
    ],
)
def test_options_without_effect_are_rejected(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ZeroBubbleConfig("zb-h1", **options)


def test_offloading_excludes_a_stream_for_weight_gradients() -> None:
    with pytest.raises(ValueError, match="got offload=50% with wgrad_stream; leave one of them out"):
        ZeroBubbleConfig("zb-h1", offload="50%", wgrad_stream=True)
