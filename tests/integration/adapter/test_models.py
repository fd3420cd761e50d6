"""A process may have several models, and their configurations may change between calls."""

from __future__ import annotations

import gc

from torch import nn

from megatron.zero_bubble.integration.adapter.models import Models


class Config:
    """A configuration, which weak references can name."""


def test_a_model_keeps_its_number_when_its_configuration_is_copied() -> None:
    """Each new number would be staged once more in host memory, and what it has done would be kept."""
    models, policy, reference = Models(), nn.Linear(1, 1), nn.Linear(1, 1)
    assert [models.number(each) for each in (policy, reference, policy, reference)] == [0, 1, 0, 1]
    for _ in range(3):
        copied = Config()
        assert models.is_unchecked(copied, "plan")
        models.mark_checked(copied, "plan")
        assert not models.is_unchecked(copied, "plan")
        del copied
        gc.collect()
    assert models.is_unchecked(Config(), "plan")
    assert len(models._checked) == 1


def test_options_are_checked_for_every_plan() -> None:
    """A model that was first seen in an evaluation, say, is checked again when it trains."""
    models, first, second = Models(), Config(), Config()
    for config in (first, second):
        models.mark_checked(config, "evaluation")
        assert models.is_unchecked(config, "training")
        models.mark_checked(config, "training")
    models.forget_checks("training")
    for config in (first, second):
        assert models.is_unchecked(config, "training")
        assert not models.is_unchecked(config, "evaluation")
