"""Microbatches of different lengths train as under stock Megatron, bit for bit, with headers and with known shapes."""

from __future__ import annotations

import ast
import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.zero_bubble.core.formats.trace import read_trace_file
from megatron.zero_bubble.engine.runtime.agreement import AgreedChannels, Agreement
from megatron.zero_bubble.engine.runtime.executor import Executor
from megatron.zero_bubble.engine.runtime.headers import HeaderedChannels
from megatron.zero_bubble.engine.runtime.transport import Transport
from megatron.zero_bubble.integration.adapter.stage import MegatronStage
from tests.helpers.ranks import RankPool
from tests.loops.varied import KINDS, SCHEDULES, Run, differences, outcomes, runs_of, train, train_traced

DEFAULT = (2, "zb-v", "packed")
PAGE = Path(__file__).parents[3] / "docs/variable-lengths.md"


@pytest.mark.parametrize(
    ("num_ranks", "schedule", "kind"),
    [pytest.param(*row, marks=() if row == DEFAULT else pytest.mark.full) for row in product((2, 4), SCHEDULES, KINDS)],
)
def test_losses_and_gradients_are_those_of_stock(ranks: RankPool, num_ranks: int, schedule: str, kind: str) -> None:
    compare(ranks, num_ranks, runs_of(schedule, kind))


@pytest.mark.full
@pytest.mark.parametrize(("schedule", "kind"), [("zb-h1", "dense"), ("zb-v", "packed")])
def test_shards_of_sequences_have_their_own_shapes(ranks: RankPool, schedule: str, kind: str) -> None:
    compare(ranks, 4, runs_of(schedule, kind, tensor=2))


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "interleaved-1f1b"])
def test_parts_of_sequences_have_their_own_shapes(ranks: RankPool, schedule: str) -> None:
    compare(ranks, 4, runs_of(schedule, "dense", context=2))


def documented(rank: int, options: dict[str, Any]) -> bool:
    """Make a configuration with these options, and the sizes that the page leaves out."""
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, **options).variable_seq_lengths


def test_stock_accepts_the_configuration_that_is_documented(ranks: RankPool) -> None:
    (line,) = (line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("config = "))
    call = ast.parse(line.removeprefix("config = "), mode="eval").body
    assert isinstance(call, ast.Call)
    options = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    assert ranks.run(2, documented, options) == [True, True]


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_iterations_of_different_lengths_are_recorded(
    ranks: RankPool, tmp_path: Path, num_ranks: int, schedule: str
) -> None:
    """It changes no bit, and has every message and microbatch of every iteration."""
    stock, *ours = runs_of(schedule, "packed")
    expected = ranks.run(num_ranks, train, *stock, timeout=120)
    for run in ours:
        folder = tmp_path / run[2].tells
        assert differences(expected, ranks.run(num_ranks, train_traced, *run, str(folder), timeout=120)) == []
        recording = read_trace_file(folder / "trace.json")
        assert [trace.timeline.schedule.num_microbatches for trace in recording.traces.values()] == [*run[2].counts]
        assert all(row.sends and row.receives for trace in recording.traces.values() for row in trace.ranks)


SHARED = {"model": "experts", "experts": 2}
PREDICTIONS = {"model": "predictions"}


@pytest.mark.full
def test_experts_that_replicas_share_are_those_of_stock(ranks: RankPool) -> None:
    compare(ranks, 4, runs_of("zb-h1", "packed", **SHARED)[:2])


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_ranks", "of_loop"), [(4, SHARED), (2, {"model": "experts"}), (2, PREDICTIONS), (4, PREDICTIONS)], ids=str
)
@pytest.mark.parametrize(
    ("schedule", "kind"), [("zb-h1", "dense"), ("zb-h1", "packed"), ("zb-h2", "packed"), ("zb-v", "packed")]
)
def test_experts_and_predictions_are_those_of_stock(
    ranks: RankPool, num_ranks: int, schedule: str, kind: str, of_loop: dict[str, Any]
) -> None:
    compare(ranks, num_ranks, runs_of(schedule, kind, **of_loop))


def compare(ranks: RankPool, num_ranks: int, runs: list[Run]) -> None:
    """Compare every run with the first one, that of stock."""
    expected, *ours = zip(*ranks.run(num_ranks, outcomes, runs, timeout=120), strict=True)
    for (_, _, loop), got in zip(runs[1:], ours, strict=True):
        assert differences(expected, got) == [], loop.tells


def left_after(rank: int) -> list[str]:
    """What channels leave for the garbage collector, and with them process groups and their threads."""
    gc.collect()
    gc.disable()
    try:
        train(rank, *runs_of("zb-h1", "dense")[1])
        kinds = (HeaderedChannels, AgreedChannels, Agreement, Transport)
        return [type(each).__name__ for each in gc.get_objects() if isinstance(each, kinds)]
    finally:
        gc.enable()


def test_nothing_waits_for_the_garbage_collector(ranks: RankPool) -> None:
    assert ranks.run(2, left_after) == [[], []]


class Waits:
    """Counts what makes a host wait for a device: Megatron's synchronization, and values of tensors read on the host.

    The loop's own code in passes may read values, so these count only between passes of our executor.
    """

    READ = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")

    def __init__(self) -> None:
        self.synchronized = self.read = 0
        self._between_passes = False

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Context in which they count."""
        run, stage_run = Executor.run, MegatronStage.run
        with ExitStack() as context:
            context.enter_context(mock.patch.object(torch.cuda, "synchronize", self._synchronize))
            context.enter_context(mock.patch.object(Executor, "run", self._around(run, True)))
            context.enter_context(mock.patch.object(MegatronStage, "run", self._around(stage_run, False)))
            for name in self.READ:
                context.enter_context(mock.patch.object(torch.Tensor, name, self._reading(getattr(torch.Tensor, name))))
            yield

    def _synchronize(self, *_: Any) -> None:
        self.synchronized += 1

    def _around(self, original: Callable[..., Any], between: bool) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            before, self._between_passes = self._between_passes, between
            try:
                return original(*args)
            finally:
                self._between_passes = before

        return run

    def _reading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any, **kwargs: Any) -> Any:
            self.read += self._between_passes
            return original(*args, **kwargs)

        return read


def waits(rank: int) -> list[tuple[int, int]]:
    """The synchronizations, and the values read between passes, under stock, and with headers and with shapes."""
    found = []
    for run in runs_of("zb-v", "packed"):
        counter = Waits()
        with counter.counted():
            train(rank, *run)
        found.append((counter.synchronized, counter.read))
    return found


@pytest.mark.full
def test_no_host_waits_for_a_device_between_passes(ranks: RankPool) -> None:
    for stock, *ours in ranks.run(2, waits, timeout=120):
        assert stock[0] > 0
        assert ours == [(0, 0)] * 3
