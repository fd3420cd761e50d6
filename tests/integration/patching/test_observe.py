"""Observing the stock schedule must not change its results."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.core.ir import Op
from megatron.zero_bubble.engine.runtime.observer import IterationObserver
from tests.helpers.parity import Layout, Outcome, assert_same_bits, train
from tests.helpers.ranks import RankPool


class Watcher(IterationObserver):
    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []

    def begin(self, op: Op) -> None:
        self.begun.append(str(op))

    def end(self, op: Op) -> None:
        self.ended.append(str(op))


def train_observed(rank: int, flags: str) -> tuple[Outcome, list[str]]:
    """Return the outcome and the observed ops of the first iteration."""
    from megatron.zero_bubble.integration.patching import observe, report

    watcher = Watcher()
    observe([watcher])
    assert len(report()) == 3
    (outcome,) = train(rank, flags, [None])  # reverts
    assert watcher.begun == watcher.ended
    return outcome, watcher.begun[:6]


@pytest.mark.parametrize(
    ("layout", "more"), [(Layout(1), ""), (Layout(2, num_layers=4), "--num-virtual-stages-per-pipeline-rank 2")]
)
def test_unsupported_stock_schedules_are_not_observed(ranks: RankPool, layout: Layout, more: str) -> None:
    for _, seen in ranks.run(layout.num_ranks, train_observed, f"{layout.flags(4)} {more}"):
        assert seen == []


def test_observe_does_not_change_stock(ranks: RankPool) -> None:
    flags = Layout(2).flags(3)
    stock, observed = ranks.run(2, train, flags, [None]), ranks.run(2, train_observed, flags)
    outcomes = [[*alone, outcome] for alone, (outcome, _) in zip(stock, observed, strict=True)]
    assert_same_bits(outcomes, [None, "observed"])
    assert [" ".join(seen) for _, seen in observed] == ["0F0 0F1 0BW0 0F2 0BW1 0BW2", "1F0 1BW0 1F1 1BW1 1F2 1BW2"]
