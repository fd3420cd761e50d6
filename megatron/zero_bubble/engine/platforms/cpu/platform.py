"""The CPU platform: CPU cores, with gloo as backend."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.engine.platforms.cpu.host import MappedMemory, available_bytes
from megatron.zero_bubble.engine.platforms.cpu.install import install
from megatron.zero_bubble.engine.platforms.cpu.stand_ins import CPU
from megatron.zero_bubble.engine.platforms.graphs import GraphPool
from megatron.zero_bubble.engine.platforms.pools import CommonPool
from megatron.zero_bubble.engine.platforms.streams import AlreadyThere, ThreadLane


class CpuPlatform:
    """The CPU platform, with gloo as backend. Marks are readings of the monotonic clock."""

    name = "cpu"
    backend = "gloo"

    def setup(self, local_rank: int) -> torch.device:
        install()
        _keep_freed_memory()
        return CPU

    def device(self, local_rank: int) -> torch.device:
        return CPU

    def current_device(self) -> torch.device:
        return CPU

    def device_count(self) -> int:
        return 1

    def num_multiprocessors(self) -> None:
        return None

    def device_name(self) -> str:
        return self.name

    def describe(self) -> str:
        threads = torch.get_num_threads()
        return f"cpu ({threads} thread{'s' * (threads > 1)} per rank; no GPU is used)"

    def synchronize(self) -> None:
        """Do nothing: CPU operators have finished when they return."""

    def mark(self) -> float:
        return time.perf_counter()

    def reached(self, mark: float) -> bool:
        return True

    def elapsed_ms(self, start: float, end: float) -> float:
        return (end - start) * 1000.0

    def reset_peak_memory(self) -> None:
        """Do nothing: the operating system's peak covers the lifetime of the process and cannot be reset."""

    def peak_memory_bytes(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def peak_reserved_bytes(self) -> int:
        return self.peak_memory_bytes()

    def spare_memory_bytes(self) -> int:
        available = min(available_bytes(), default=0)
        return available * 9 // 10 // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def lane(self) -> ThreadLane:
        return ThreadLane()

    def thread_lane(self) -> ThreadLane:
        return ThreadLane()

    def host_memory(self, limit: int | None = None) -> MappedMemory:
        return MappedMemory(limit)

    def memory_pool(self) -> CommonPool:
        return CommonPool()

    def graph_pool(self, generators: Sequence[torch.Generator] = ()) -> GraphPool:
        raise UserError("CUDA graphs need a GPU; got ranks on the CPU; set --cuda-graph-impl none, or train on GPUs")

    def to_host(self, tensor: torch.Tensor, after: dist.Work | None = None) -> AlreadyThere:
        if after is not None:
            after.wait()
        return AlreadyThere(tensor)

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor


def _keep_freed_memory() -> None:
    """Make the C library keep freed memory, as torch's allocator does on a GPU.

    By default glibc returns the memory of large tensors to the system. Mapping the pages again takes up to a tenth of
    the time of each pass.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or platform.libc_ver()[0] != "glibc":
        return
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of malloc.h
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(mmap_max, 0)
