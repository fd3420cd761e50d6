"""Memory pools: who allocates in them, what happens when memory runs out, and blocks on a real GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from megatron.zero_bubble.engine.platforms import select
from megatron.zero_bubble.engine.platforms.cuda import CudaPlatform
from megatron.zero_bubble.engine.platforms.pools import CommonPool, MemoryPool

MIB = 1 << 20


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a pool of the CUDA platform asks of torch, without a GPU."""
    calls: list[str] = []

    @contextmanager
    def use_mem_pool(pool: Any, device: Any = None) -> Iterator[None]:
        calls.append(f"begin {device}")
        try:
            yield
        finally:
            calls.append("end")

    monkeypatch.setattr(CudaPlatform, "current_device", lambda self: torch.device("cuda", 3))
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "MemPool", object)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty cache"))
    return calls


def test_allocations_are_made_in_the_pool_of_their_device(noted: list[str]) -> None:
    CudaPlatform().memory_pool().allocate(lambda: noted.append("work"))
    assert noted == ["begin cuda:3", "work", "end"]


def test_pool_that_runs_out_of_memory_gets_what_others_keep_unused(noted: list[str]) -> None:
    """Outside of the pool: within it, torch frees nothing but the pool's own blocks."""

    def work() -> None:
        noted.append("work")
        if noted.count("work") == 1:
            raise torch.OutOfMemoryError

    CudaPlatform().memory_pool().allocate(work)
    assert noted == ["begin cuda:3", "work", "end", "empty cache", "begin cuda:3", "work", "end"]


def test_second_lack_of_memory_is_raised(noted: list[str]) -> None:
    def work() -> None:
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        CudaPlatform().memory_pool().allocate(work)
    assert noted.count("empty cache") == 1


def test_allocators_without_pools_have_the_common_one(noted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    pool = CudaPlatform().memory_pool()
    assert isinstance(pool, CommonPool)
    pool.allocate(lambda: noted.append("work"))
    assert noted == ["work"]
    assert isinstance(select("cpu").memory_pool(), CommonPool)


def on_gpu() -> tuple[MemoryPool, torch.Tensor]:
    """A pool, and a tensor of 64 MiB without memory."""
    platform = select("cuda")
    platform.setup(0)
    tensor = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    tensor.untyped_storage().resize_(0)
    return platform.memory_pool(), tensor


@pytest.mark.gpu
def test_gpu_blocks_are_used_again_whole() -> None:
    pool, tensor = on_gpu()
    storage = tensor.untyped_storage()
    pool.allocate(lambda: storage.resize_(64 * MIB))
    torch.cuda.empty_cache()
    place, num_allocated = tensor.data_ptr(), torch.cuda.memory_stats()["num_device_alloc"]
    activations = []
    for number in range(1, 4):
        storage.resize_(0)
        activations.append(torch.empty(30 * MIB, dtype=torch.uint8, device="cuda"))
        pool.allocate(lambda: storage.resize_(64 * MIB))
        assert tensor.data_ptr() == place
        assert torch.cuda.memory_stats()["num_device_alloc"] == num_allocated + number, "one per activation"
    tensor.fill_(7)
    assert (tensor == 7).all()


@pytest.mark.gpu
def test_gpu_pool_gets_what_the_common_pool_keeps_unused() -> None:
    pool, tensor = on_gpu()
    torch.cuda.empty_cache()
    kept = torch.empty(96 * MIB, dtype=torch.uint8, device="cuda")
    del kept
    limit = torch.cuda.memory_reserved() + 16 * MIB
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    try:
        pool.allocate(lambda: tensor.untyped_storage().resize_(64 * MIB))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    tensor.fill_(7)
    assert (tensor == 7).all()
