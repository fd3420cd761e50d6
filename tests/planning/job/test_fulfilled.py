"""Tests of options that a schedule fulfills by itself."""

from __future__ import annotations

from types import SimpleNamespace

from megatron.zero_bubble.planning.job.fulfilled import FULFILLED, fulfill
from megatron.zero_bubble.planning.job.options import check_options
from megatron.zero_bubble.planning.run_options import RunOptions
from megatron.zero_bubble.planning.setup import Searched, Setup


def test_options_that_are_on_are_switched_off_with_one_line_each() -> None:
    options = SimpleNamespace(**dict.fromkeys(FULFILLED, True), hidden_size=64)
    lines = fulfill(options)
    assert lines[0] == "--delay-wgrad-compute is switched off: the schedule delays all weight gradients itself, to W"
    assert [line.partition(" ")[0] for line in lines[1:]] == [
        "--overlap-dispatch-backward-with-experts-wgrad",
        "--overlap-p2p-communication-warmup-flush",
    ]
    assert vars(options) == dict.fromkeys(FULFILLED, False) | {"hidden_size": 64}
    check_options(options, RunOptions(Setup(Searched())))
    assert fulfill(options) == [] == fulfill(SimpleNamespace())
