"""Lanes on threads: order, errors, memory, and the end of the process."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from collections.abc import Callable

import pytest
import torch

from megatron.zero_bubble.engine.platforms.streams import Result, ThreadLane


def test_work_runs_in_order_and_its_memory_is_freed() -> None:
    lane, seen, go = ThreadLane(), list[int](), threading.Event()
    tensor = torch.ones(1)
    kept = weakref.ref(tensor)

    def first(used: torch.Tensor = tensor) -> int:
        go.wait(10)
        seen.append(1)
        return int(used.item())

    result = lane.start(first, (tensor,))
    lane.start(lambda: seen.append(2), ())
    del tensor, first
    assert kept() is not None
    go.set()
    assert result.wait() == 1
    assert lane.close(10)
    assert seen == [1, 2]
    assert kept() is None


def test_nothing_runs_after_an_error() -> None:
    """The next work item would take part in the collective of the failed one."""
    lane, ran, go = ThreadLane(), list[int](), threading.Event()

    def fail() -> None:
        go.wait(10)
        raise ValueError("of the first")

    failed, queued = lane.start(fail, ()), lane.start(lambda: ran.append(1), ())
    go.set()
    with pytest.raises(ValueError, match="of the first"):
        failed.wait()
    with pytest.raises(RuntimeError, match="of the first"):
        queued.wait()
    with pytest.raises(RuntimeError, match="of the first"):
        lane.start(lambda: ran.append(2), ())
    assert lane.close(10)
    assert not ran


def test_a_lane_keeps_no_frames_of_those_who_raise_its_error() -> None:
    lane = ThreadLane()

    def fail() -> None:
        raise ValueError("of the first")

    result: Result | None = lane.start(fail, ())

    def run_a_pass(wait: Callable[[], object], error: type[Exception]) -> weakref.ref[torch.Tensor]:
        value = torch.ones(1)
        with pytest.raises(error, match="of the first"):
            wait()
        return weakref.ref(value)

    assert result is not None
    waiting = run_a_pass(result.wait, ValueError)
    result = None
    lane.join()
    assert waiting() is None
    for _ in range(2):
        assert run_a_pass(lambda: lane.start(fail, ()), RuntimeError)() is None
    assert lane.close(10)


FAILING = """
import threading
from megatron.zero_bubble.engine.platforms.streams import ThreadLane
ThreadLane().start(threading.Event().wait, ())
raise SystemExit(3)
"""


def test_a_blocked_lane_does_not_keep_the_process_alive() -> None:
    assert subprocess.run([sys.executable, "-c", FAILING], timeout=60, check=False).returncode == 3


def test_closing_does_not_wait_for_a_blocked_lane() -> None:
    lane, go = ThreadLane(), threading.Event()
    blocked = lane.start(go.wait, ())
    assert not lane.close(0.1)
    go.set()
    assert blocked.wait()
    assert lane.close(10)


def test_a_thread_begins_with_what_it_is_told() -> None:
    """Such as choosing a GPU, which is a property of the thread."""
    seen: list[str] = []
    lane = ThreadLane(lambda: seen.append(threading.current_thread().name))
    assert lane.start(lambda: [*seen, threading.current_thread().name], ()).wait() == ["lane", "lane"]
    assert lane.close(5.0)
