"""Tests of the options that are settled at the start: switched off with a line, or refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.plan import PlanFile
from megatron.zero_bubble.core.schedules import build
from megatron.zero_bubble.planning.exclusions import OPTIONS
from megatron.zero_bubble.planning.job.options import check_options
from megatron.zero_bubble.planning.job.settled import settle_options
from megatron.zero_bubble.planning.run_options import RunOptions
from megatron.zero_bubble.planning.setup import Given, Named, Searched, Setup

SWITCHED_OFF = [rule.option for rule in OPTIONS if rule.is_set]
RUN = RunOptions(Setup(Searched()))


def test_options_that_are_on_are_switched_off_with_one_line_each() -> None:
    options = SimpleNamespace(**dict.fromkeys(SWITCHED_OFF, True), hidden_size=64)
    lines = settle_options([options], RUN)
    assert lines[0] == "--delay-wgrad-compute is switched off: the schedule delays all weight gradients itself, to W"
    assert [line.partition(" ")[0] for line in lines[1:]] == [
        "--overlap-dispatch-backward-with-experts-wgrad",
        "--overlap-p2p-communication-warmup-flush",
    ]
    assert vars(options) == dict.fromkeys(SWITCHED_OFF, False) | {"hidden_size": 64}
    check_options(options, RUN)
    assert settle_options([options], RUN) == [] == settle_options([SimpleNamespace()], RUN)


def test_an_option_of_several_configurations_is_switched_off_in_all_with_one_line() -> None:
    parts = [SimpleNamespace(delay_wgrad_compute=on) for on in (False, True, True)]
    assert len(settle_options([*parts, SimpleNamespace()], RUN)) == 1
    assert not any(part.delay_wgrad_compute for part in parts)


def test_pairs_are_asked_of_the_model_alone() -> None:
    """The precision of an optimizer says nothing about the layers."""
    schedule = replace(build("1f1b", num_ranks=2, num_microbatches=2), overlap_experts=True)
    of_file = RunOptions(Setup(Given("plan.json", PlanFile(schedule))))
    paired = RunOptions(Setup(Named("dualpipe-v"), pairs=True))
    parts = [SimpleNamespace(bf16=True), SimpleNamespace(bf16=False, fp16=False)]
    assert settle_options(parts, paired) == [] == settle_options(parts, of_file)
    with pytest.raises(UserError, match="need bf16 to be True, or fp16, because .*; give --bf16"):
        settle_options(parts[::-1], paired)
