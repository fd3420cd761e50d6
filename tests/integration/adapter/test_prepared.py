"""Tests of the options of a loop of one's own, which are settled in the first iteration of each of its models."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir.vocabulary import Divided
from megatron.zero_bubble.core.schedules import build
from megatron.zero_bubble.integration.adapter.prepared import check_model, check_stepping
from megatron.zero_bubble.planning.exclusions import BALANCE, LENGTHS, ON_A_V, OPTIONS, SHARDS
from megatron.zero_bubble.planning.rule import OptionRule
from megatron.zero_bubble.planning.setup import Cuts, Setup, Validated
from tests.helpers.refusals import unsupported

SCHEDULE = build("zb-h1", num_ranks=2, num_microbatches=2)
SETUP = Setup()
CHOSEN = {
    "post-validation": Setup(step=Validated()),
    "sequence slices": Setup(cuts=Cuts(2, "even")),
    "vocabulary parallelism": Setup(vocabulary=Divided(1)),
    "pairs": Setup(pairs=True),
}
ROWS = [rule for rule in OPTIONS if rule.choice not in (BALANCE, LENGTHS, SHARDS, ON_A_V)]
"""Loops of one's own have no balanced microbatches, and say in every iteration whether lengths differ; ``check_shards``
has the rows of sharded units, and a loop builds the chunks of a V itself."""


class Wrapped(torch.nn.Module):
    """A chunk in data parallelism."""

    def __init__(self, config: Any, ddp_config: Any) -> None:
        super().__init__()
        self.config, self.ddp_config = config, ddp_config


def settled(config: Any, of_data_parallelism: Any, setup: Setup) -> list[str]:
    said: list[str] = []
    if setup == SETUP:
        check_model([Wrapped(config, of_data_parallelism)] * 2, setup, SCHEDULE, said.append)
    else:
        config.overlap_moe_expert_parallel_comm = setup.pairs  # a model has pairs by its own option
        check_stepping(config, of_data_parallelism, setup, said.append)
    return said


@pytest.mark.parametrize("rule", ROWS, ids=lambda rule: f"{rule.choice.words}: {rule.option}")
def test_every_row_holds_for_the_model_and_for_its_data_parallelism(rule: OptionRule) -> None:
    setup = CHOSEN.get(rule.choice.words, SETUP)
    for place in (0, 1):
        parts = [SimpleNamespace(), SimpleNamespace()]
        setattr(parts[place], rule.option, unsupported(rule))
        if rule.is_set:
            assert [rule.why in line for line in settled(*parts, setup)] == [True]
            assert getattr(parts[place], rule.option) == rule.value
        else:
            with pytest.raises(UserError, match=re.escape(f"need {rule.option}={rule.value!r}, because {rule.why}")):
                settled(*parts, setup)
