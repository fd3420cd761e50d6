"""Host memory of the CPU platform: mapped files, which torch's CPU allocator, here the device's, does not count."""

from __future__ import annotations

import os

import torch

from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.platforms.host import HostMemory


class MappedMemory(HostMemory):
    """Buffers in files in memory, without a name: no other process can remove or truncate them, and none is left when
    this process ends. With files on a disk, copies would wait for the disk.
    """

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        descriptor = os.memfd_create("zero-bubble-host")
        try:
            # Without its pages, a write to the mapping could find no memory and would kill the process.
            os.posix_fallocate(descriptor, 0, num_bytes)
            path = f"/proc/self/fd/{descriptor}"
            return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
        except OSError as error:
            raise UserError(
                f"activations in host memory need {num_bytes} more bytes on this machine, got {error.strerror}; lower "
                "the percentage of --zero-bubble-offload",
                everywhere=False,
            ) from error
        finally:
            os.close(descriptor)
