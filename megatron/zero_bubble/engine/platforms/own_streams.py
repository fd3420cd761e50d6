"""CUDA streams that have one user each.

torch has 32 streams per priority and device, which it hands out in turn: the 33rd user gets the stream of the first.
Users of one stream wait for each other, and if they wait for other ranks, ranks can deadlock. Every communicator of
NCCL takes a stream from there as well, so a job can need more than 32.

torch has no function for a stream that runs alongside its default stream: that of ``torch.cuda.cudart()`` has neither
flags nor a priority. So the driver makes it; its streams are those of the runtime.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict

import torch

from megatron.zero_bubble.core.errors import UserError

_NON_BLOCKING = 1
"""``CU_STREAM_NON_BLOCKING``: work does not wait for that of the default stream, on which passes run."""

_unused: defaultdict[tuple[torch.device, int], list[torch.cuda.Stream]] = defaultdict(list)
"""By device and priority. Streams are never destroyed: torch's allocator may still refer to them."""


def take_stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """A stream that nobody else uses.

    Args:
        priority: as in CUDA, a lower number is a higher priority; passes have 0.

    Raises:
        UserError: the driver cannot make it.
    """
    unused = _unused[device, priority]
    return unused.pop() if unused else torch.cuda.ExternalStream(_make(device, priority), device)


def give_stream(stream: torch.cuda.Stream, priority: int = 0) -> None:
    """Give a stream back, whose work has ended; ``priority`` is that of ``take_stream``."""
    _unused[stream.device, priority].append(stream)


def _make(device: torch.device, priority: int) -> int:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.mem_get_info()  # a call of the runtime makes the context current that the driver needs
        # torch has loaded this library.
        status = ctypes.CDLL("libcuda.so.1").cuStreamCreateWithPriority(
            ctypes.byref(handle), ctypes.c_uint(_NON_BLOCKING), ctypes.c_int(priority)
        )
    if status or handle.value is None:
        raise UserError(
            f"collectives and copies alongside passes need CUDA streams of their own; got error {status} of the CUDA "
            "driver for another stream; look for earlier CUDA errors, or for other processes that use the GPU",
            everywhere=False,
        )
    return handle.value
