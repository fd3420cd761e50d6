"""Captures of graphs, without a GPU: no garbage is collected within, and torch is asked for what they need."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from megatron.zero_bubble.engine.platforms.cuda_graphs import CudaGraphPool
from megatron.zero_bubble.engine.platforms.graphs import without_garbage_collection


class _Garbage:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def _collects() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def _is_collected() -> bool:
    """Whether garbage that is made now is gone when Python has made many objects."""
    gone = weakref.ref(_Garbage())
    kept = [[number] for number in range(20_000)]
    return len(kept) > 0 and gone() is None


@pytest.mark.usefixtures("_collects")
def test_garbage_is_collected_before_a_capture_but_not_within() -> None:
    gc.collect()
    gc.disable()
    before = weakref.ref(_Garbage())
    gc.enable()
    with without_garbage_collection():
        assert before() is None and not _is_collected()
        assert gc.get_freeze_count(), "collections that torch asks for have little to do"
    assert gc.isenabled() and not gc.get_freeze_count() and _is_collected()


@pytest.mark.usefixtures("_collects")
def test_a_job_that_collects_its_garbage_itself_goes_on_to() -> None:
    gc.disable()
    gc.freeze()
    with pytest.raises(ValueError, match="capture"), without_garbage_collection():
        raise ValueError("a capture fails")
    assert not gc.isenabled() and gc.get_freeze_count()


class _Graph:
    def __init__(self) -> None:
        self.generators: list[str] = []

    def register_generator_state(self, generator: str) -> None:
        self.generators.append(generator)


@pytest.mark.parametrize(("current", "asked"), [("default", None), ("of megatron-core", "of megatron-core")])
def test_graphs_are_captured_on_the_stream_of_the_passes(
    monkeypatch: pytest.MonkeyPatch, current: str, asked: str | None
) -> None:
    """autograd would otherwise make the capture wait for it, which is an error; the default stream has no captures."""
    captures: list[tuple[Any, ...]] = []

    @contextmanager
    def graph(graph: _Graph, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        captures.append((tuple(graph.generators), pool, stream, capture_error_mode))
        yield

    handles = iter(range(9))
    for name, value in {
        "CUDAGraph": _Graph,
        "graph": graph,
        "graph_pool_handle": lambda: next(handles),
        "current_stream": lambda: current,
        "default_stream": lambda: "default",
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    one, other = (CudaGraphPool(["of tensor parallelism"]) for _ in range(2))  # type: ignore[list-item]
    assert [pool.capture(lambda: "result")[1] for pool in (one, one, other)] == ["result"] * 3
    more = ("of tensor parallelism",), asked, "thread_local"
    assert captures == [(more[0], pool, *more[1:]) for pool in (0, 0, 1)]
