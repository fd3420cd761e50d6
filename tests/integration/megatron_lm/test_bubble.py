"""Tests of bubble reports in a Megatron-LM job: one line and two scalars per log interval, on the last rank."""

from __future__ import annotations

import re
import sys
from types import ModuleType, SimpleNamespace

import pytest

from tests.helpers.ranks import RankPool
from tests.integration.adapter.test_foreign_loop import STEPS, train

START = 9


class Args:
    """A job's flags; ``curr_iteration`` advances with each read, once per iteration."""

    log_interval = 2

    def __init__(self) -> None:
        self._iteration = START

    @property
    def curr_iteration(self) -> int:
        self._iteration += 1
        return self._iteration - 1


def job(_rank: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[tuple[str, float, int]]]:
    """Run the job on one rank; return its printed lines and TensorBoard scalars."""
    from megatron.core import parallel_state

    from megatron.zero_bubble.integration.megatron_lm.bubble import JobBubble
    from megatron.zero_bubble.integration.patching import apply, revert

    written: list[tuple[str, float, int]] = []
    said: list[str] = []
    global_vars = ModuleType("megatron.training.global_vars")
    writer = SimpleNamespace(add_scalar=lambda *scalar: written.append(scalar))
    monkeypatch.setattr(global_vars, "get_tensorboard_writer", lambda: writer, raising=False)
    training = ModuleType("megatron.training")
    monkeypatch.setattr(training, "global_vars", global_vars, raising=False)
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", global_vars)
    monkeypatch.setattr("builtins.print", lambda text, **_: said.append(text))
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, create_gloo_process_groups=False)
    bubble = JobBubble(Args())
    apply("zb-h1", [bubble])
    try:
        train()
    finally:
        revert()
        monkeypatch.undo()
    return said, written


def on_rank(rank: int) -> tuple[list[str], list[tuple[str, float, int]]]:
    return job(rank, pytest.MonkeyPatch())


def test_bubble_is_reported_per_log_interval(ranks: RankPool) -> None:
    assert STEPS == 3, "expected iterations are 10 to 12"
    first, (said, written) = ranks.run(2, on_rank)
    assert first == ([], [])
    rates = r"bubble ([\d.]+)% \(planned ([\d.]+)%\), mean idle ([\d.]+)% \(planned ([\d.]+)%\)"
    lines = [re.fullmatch(rf"zero-bubble: iteration (\d+): {rates}", s) for s in said]
    assert [line and line[1] for line in lines] == ["10", "12"]
    names = ("measured", "planned", "idle", "planned-idle")
    assert [(name, at) for name, _, at in written] == [(f"zero-bubble/{name}", at) for at in (10, 12) for name in names]
    shown = [f"{value:.1%}" for _, value, _ in written]
    assert shown == [f"{line[i]}%" for line in lines if line for i in (2, 3, 4, 5)]
    assert all(0.0 <= value < 1.0 for _, value, _ in written)
