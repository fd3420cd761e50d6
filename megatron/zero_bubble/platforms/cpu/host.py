"""Host memory of the CPU platform: mapped files, which torch's CPU allocator, here the device's, does not count."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch

from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.platforms.host import HostMemory


class MappedMemory(HostMemory):
    """Buffers in files without a name: no other process can remove or truncate them, and none is left when this process
    ends.
    """

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        folder = tempfile.gettempdir()
        try:
            descriptor, path = tempfile.mkstemp(prefix="zero-bubble-host-", dir=folder)
            try:
                # Without blocks on the disk, a write to the mapping of a full disk would kill the process.
                os.posix_fallocate(descriptor, 0, num_bytes)
                return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
            finally:
                os.close(descriptor)
                Path(path).unlink()
        except OSError as error:
            raise UserError(
                f"activations in host memory need {num_bytes} bytes in {folder}, got {error.strerror}; set TMPDIR to a "
                "folder with more space, or lower the percentage of --zero-bubble-offload",
                everywhere=False,
            ) from error
