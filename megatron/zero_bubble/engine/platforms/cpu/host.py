"""Host memory of the CPU platform: mapped memory, which torch's CPU allocator, here the device's, does not count."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.engine.platforms.host import HostMemory

_GROUP = Path("/sys/fs/cgroup")


class MappedMemory(HostMemory):
    """Blocks in files in memory, without a name: no other process can remove or truncate them, and none is left when
    this process ends. With files on a disk, copies would wait for the disk. Systems other than Linux have no such
    files; there, blocks are anonymous memory.
    """

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        available = min(available_bytes(), default=None)
        if available is not None and num_bytes > available:
            raise _no_room(num_bytes, f"{available} bytes available")
        if not hasattr(os, "memfd_create"):
            return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
        descriptor = os.memfd_create("zero-bubble-host")
        try:
            # Without its pages, a write to the mapping could find no memory and would kill the process.
            os.posix_fallocate(descriptor, 0, num_bytes)
            path = f"/proc/self/fd/{descriptor}"
            return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
        except OSError as error:
            raise _no_room(num_bytes, str(error.strerror)) from error
        finally:
            os.close(descriptor)


def _no_room(num_bytes: int, found: str) -> UserError:
    return UserError(
        f"activations in host memory need {num_bytes} more bytes on this machine, got {found}; lower the percentage of "
        "--zero-bubble-offload",
        everywhere=False,
    )


def available_bytes() -> Iterator[int]:
    """The memory that the machine and the container say is available, as far as they do: beyond it, Linux kills
    processes instead of failing.
    """
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024
    with suppress(OSError):
        limit, used, figures = (
            (_GROUP / name).read_text().strip() for name in ("memory.max", "memory.current", "memory.stat")
        )
        by_name = dict(line.split() for line in figures.splitlines())
        # Pages of files on a disk are dropped when memory is needed; after reading data, they fill a container.
        cached = sum(int(by_name.get(name, 0)) for name in ("inactive_file", "active_file"))
        if limit != "max":
            yield max(0, int(limit) - int(used) + cached)
