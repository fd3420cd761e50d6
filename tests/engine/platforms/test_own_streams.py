"""Streams of one user each: what is asked of the CUDA driver, with a stand-in and on a GPU."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.engine.platforms.cuda import CudaPlatform
from megatron.zero_bubble.engine.platforms.own_streams import _make
from tests.engine.platforms.fake_cuda import POOL_SIZE


def make_with(monkeypatch: pytest.MonkeyPatch, status: int) -> tuple[list[tuple[str, int, int]], int]:
    """What the driver is asked for, and the handle that results, if the driver returns ``status``."""
    asked = []

    def create(handle: Any, flags: ctypes.c_uint, priority: ctypes.c_int) -> int:
        asked.append(("libcuda.so.1", flags.value, priority.value))
        handle._obj.value = 2**40
        return status

    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    libraries = {"libcuda.so.1": SimpleNamespace(cuStreamCreateWithPriority=create)}
    monkeypatch.setattr(ctypes, "CDLL", libraries.__getitem__)
    return asked, _make(torch.device("cuda", 0), -1)


def test_driver_makes_a_stream_that_does_not_wait_for_the_default_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_with(monkeypatch, 0) == ([("libcuda.so.1", 1, -1)], 2**40)


def test_error_of_the_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="got error 2 of the CUDA driver for another stream"):
        make_with(monkeypatch, 2)


@pytest.mark.gpu
def test_lanes_of_a_gpu_have_streams_of_their_own_that_run() -> None:
    platform = CudaPlatform()
    pool = [torch.cuda.Stream(priority=-1) for _ in range(POOL_SIZE)]
    lanes = [platform.lane() for _ in range(POOL_SIZE + 1)]
    handles = {lane._stream.cuda_stream for lane in lanes}
    assert len(handles) == len(lanes)
    assert not handles & {0, *(stream.cuda_stream for stream in pool)}
    assert {(lane._stream.priority, lane._stream.device.index) for lane in lanes} == {(-1, torch.cuda.current_device())}
    part = torch.ones(1000, device="cuda")
    results = [lane.start(lambda number=number: part * number, [part]) for number, lane in enumerate(lanes)]
    assert [result.wait().sum().item() for result in results] == [1000.0 * number for number in range(len(lanes))]
    assert all(lane.close(10.0) for lane in lanes)
