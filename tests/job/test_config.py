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


@pytest.mark.parametrize(
    "schedule, options, sentence",
    [
        ("zb-auto", {}, "with zb-auto, whose plans do not count host memory; got offload=50% with zb-auto"),
        ("seq-zb-h1", {}, "with sequence slices, which share keys and values; got offload=50% with seq-zb-h1; leave"),
        ("zb-h1", {"vocabulary": 2}, "with vocabulary parallelism; got offload=50% with zb-h1; leave one of them out"),
        ("zb-h1", {"wgrad_stream": True}, "with wgrad_stream, which uses activations longer than planned"),
    ],
)
def test_what_offloading_does_not_support_is_rejected(schedule: str, options: dict[str, Any], sentence: str) -> None:
    ZeroBubbleConfig(schedule, **options)
    with pytest.raises(ValueError, match=f"offloading does not work yet {sentence}"):
        ZeroBubbleConfig(schedule, offload="50%", **options)
