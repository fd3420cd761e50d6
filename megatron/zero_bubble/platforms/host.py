"""Host memory for tensors that leave the device."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from megatron.zero_bubble.errors import UserError

_SPARE = 2
"""A free buffer is used again for at least its size divided by this."""


class HostMemory(ABC):
    """Buffers in host memory. Freed buffers are kept for later, because a new one is slow to make.

    Args:
        limit: most bytes of all buffers together; None for no limit.

    Attributes:
        used: bytes of the buffers in use.
        peak: the largest ``used`` so far.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._free: list[torch.Tensor] = []
        self._size = 0  # of all buffers
        self.used = self.peak = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return an uninitialized buffer, a uint8 tensor (n,) with n >= ``num_bytes``.

        Raises:
            UserError: the limit is exceeded, or the machine has no more memory.
        """
        fitting = [buffer for buffer in self._free if num_bytes <= buffer.numel() <= _SPARE * num_bytes]
        if fitting:
            found = min(fitting, key=torch.Tensor.numel)
            # By identity: tensors compare by elements.
            self._free = [buffer for buffer in self._free if buffer is not found]
        else:
            found = self._new(num_bytes)
        self.used += found.numel()
        self.peak = max(self.peak, self.used)
        return found

    def give(self, buffer: torch.Tensor) -> None:
        """Take ``buffer`` back. Only copies that start later may use it again."""
        self.used -= buffer.numel()
        self._free.append(buffer)

    def close(self) -> None:
        """Free all buffers that are not in use."""
        for buffer in self._free:
            self._size -= buffer.numel()
            self._release(buffer)
        self._free.clear()

    def _new(self, num_bytes: int) -> torch.Tensor:
        if self._limit is not None and self._size + num_bytes > self._limit:
            self.close()
        if self._limit is not None and self._size + num_bytes > self._limit:
            raise UserError(
                f"activations in host memory must fit in --zero-bubble-host-memory, {self._limit} bytes per rank; this "
                f"rank has {self._size} bytes in use and needs {num_bytes} more; raise the limit, or lower the "
                "percentage of --zero-bubble-offload",
                everywhere=False,
            )
        made = self._allocate(num_bytes)
        self._size += num_bytes
        return made

    @abstractmethod
    def _allocate(self, num_bytes: int) -> torch.Tensor:
        """Make a buffer of exactly ``num_bytes``."""

    def _release(self, buffer: torch.Tensor) -> None:  # noqa: B027 (most buffers end with their last reference)
        """Undo what ``_allocate`` did in addition to making the tensor."""
