"""Host memory for tensors that leave the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from megatron.zero_bubble.core.errors import UserError

ALIGNMENT = 512
"""Bytes between starts of storages in host memory, as torch aligns tensors on a GPU."""


class Extent(NamedTuple):
    """A range of bytes of a block of host memory."""

    block: int
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


class PinnedBuffer:
    """Uninitialized host memory, in one piece or several.

    Args:
        num_bytes: its size; the last piece may be longer.
        extents: the places of its pieces.
        pieces: uint8 tensors, (n,) each.
    """

    def __init__(self, num_bytes: int, extents: Sequence[Extent], pieces: Sequence[torch.Tensor]) -> None:
        self.num_bytes = num_bytes
        self.extents = extents
        self._pieces = pieces

    def parts(self, start: int, num_bytes: int) -> Iterator[torch.Tensor]:
        """The bytes from ``start`` on, in order: a uint8 tensor for each piece that has some of them."""
        end = start + num_bytes
        for extent, piece in zip(self.extents, self._pieces, strict=True):
            if start < extent.size and end > 0:
                yield piece[max(0, start) : end]
            start, end = start - extent.size, end - extent.size


class HostMemory(ABC):
    """Blocks of host memory, divided into buffers.

    Blocks are freed only by ``close``: a copy that is queued may still use them, and to wait for it within an iteration
    could mean to wait for passes that are not issued yet. A buffer may have several pieces, so that free bytes fit
    whatever their places. The blocks together are never larger than the buffers that were in use at the same time, each
    rounded up to ``ALIGNMENT``.

    Args:
        limit: most bytes of the buffers in use, not rounded, because plans do not round; None for no limit.

    Attributes:
        used: bytes of the buffers in use.
        peak: the largest ``used`` so far.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._blocks: list[torch.Tensor] = []
        self._free: list[Extent] = []  # in order, none next to another
        self.used = self.peak = 0

    def reserve(self, num_bytes: int) -> None:
        """Make one block of all bytes that buffers of ``num_bytes`` together need in addition to the present blocks.

        Raises:
            UserError: the machine has no more memory.
        """
        if self._limit is not None:
            num_bytes = min(num_bytes, self._limit)
        missing = _rounded(num_bytes) - sum(block.numel() for block in self._blocks)
        if missing > 0:
            self._add_block(missing)

    def take(self, num_bytes: int) -> PinnedBuffer:
        """Return a buffer of ``num_bytes``.

        Raises:
            UserError: the limit is exceeded, or the machine has no more memory.
        """
        if self._limit is not None and self.used + num_bytes > self._limit:
            raise UserError(
                f"activations in host memory must fit in --zero-bubble-host-memory, {self._limit} bytes per rank; this "
                f"rank has {self.used} bytes in use and needs {num_bytes} more; raise the limit, or lower the "
                "percentage of --zero-bubble-offload",
                everywhere=False,
            )
        size = _rounded(num_bytes)
        missing = size - sum(map(_size, self._free))
        if missing > 0:
            self._add_block(missing)
        whole = [extent for extent in self._free if extent.size >= size]
        # The smallest that is large enough, else the largest ones.
        candidates = [min(whole, key=_size)] if whole else sorted(self._free, key=_size, reverse=True)
        taken: list[Extent] = []
        for extent in candidates:
            part = min(extent.size, size - sum(map(_size, taken)))
            if part:
                taken.append(extent._replace(end=extent.start + part))
                self._free.remove(extent)
                if part < extent.size:
                    self._free.append(extent._replace(start=extent.start + part))
        self._free.sort()
        self.used += num_bytes
        self.peak = max(self.peak, self.used)
        return PinnedBuffer(num_bytes, taken, [self._blocks[block][start:end] for block, start, end in taken])

    def give(self, buffer: PinnedBuffer) -> None:
        """Take ``buffer`` back. Later copies must start after all that use its memory."""
        self.used -= buffer.num_bytes
        merged: list[Extent] = []
        for extent in sorted((*self._free, *buffer.extents)):
            if merged and merged[-1].block == extent.block and merged[-1].end == extent.start:
                merged[-1] = merged[-1]._replace(end=extent.end)
            else:
                merged.append(extent)
        self._free = merged

    def close(self) -> None:
        """Free all memory. No buffer may be in use, and all copies must have ended."""
        for block in self._blocks:
            self._release(block)
        self._blocks.clear()
        self._free.clear()
        self.used = 0

    def _add_block(self, num_bytes: int) -> None:
        self._blocks.append(self._allocate(num_bytes))
        self._free.append(Extent(len(self._blocks) - 1, 0, num_bytes))

    @abstractmethod
    def _allocate(self, num_bytes: int) -> torch.Tensor:
        """Make a block, a uint8 tensor of exactly ``num_bytes``."""

    def _release(self, block: torch.Tensor) -> None:  # noqa: B027 (most blocks end with their last reference)
        """Undo what ``_allocate`` did in addition to making the tensor."""


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _size(extent: Extent) -> int:
    return extent.size
