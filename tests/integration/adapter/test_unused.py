"""One line if a loop steps its optimizer although the schedule has not run."""

from __future__ import annotations

import torch

from tests.helpers.ranks import RankPool


def lines(_rank: int, has_trained: bool) -> list[str]:
    """What is printed during two steps of an optimizer, and one after ``revert``."""
    from megatron.zero_bubble.integration.patching import apply, revert
    from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig

    said: list[str] = []
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    pipeline = apply(ZeroBubbleConfig(schedule="zb-h1"), say=said.append)
    try:
        if has_trained:
            pipeline.microbatch = 8, 1
        optimizer.step()
        optimizer.step()
    finally:
        revert()
    optimizer.step()
    return said


def test_a_schedule_that_never_runs_is_named(ranks: RankPool) -> None:
    [(line,)] = ranks.run(1, lines, False)
    assert line.startswith("schedule zb-h1 is applied, but it has not run before the first step of an optimizer: ")
    assert ranks.run(1, lines, True) == [[]]
