"""Where the passes run: ``cuda`` (NCCL) or ``cpu`` (gloo ranks with no GPU).

Everything above this layer talks to a :class:`Platform`; the name ``torch.cuda`` appears only below it. The CPU
platform also makes megatron-core itself run without a GPU (:mod:`megatron.zero_bubble.platforms.cpu`).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.platforms.streams import SideStream

NAMES = ("cpu", "cuda", "auto")


class Platform(Protocol):
    """What training, the runtime and the measurements need of a device.

    Attributes:
        name: ``"cpu"`` or ``"cuda"``.
        backend: the ``torch.distributed`` backend that moves this platform's tensors, ``"gloo"`` or ``"nccl"``.
    """

    name: str
    backend: str

    def setup(self, local_rank: int) -> torch.device:
        """Make the process ready for this platform, before megatron.core is imported, and return its device."""

    def device(self, local_rank: int) -> torch.device:
        """The device of the ``local_rank``-th process of this machine."""

    def current_device(self) -> torch.device:
        """The device that this process computes on by default."""

    def device_count(self) -> int:
        """How many devices this machine offers; 1 on the CPU platform, which all ranks share."""

    def describe(self) -> str:
        """One phrase for the line printed at start-up."""

    def synchronize(self) -> None:
        """Wait until the device has finished everything given to it."""

    def mark(self) -> Any:
        """A point in the device's time, recorded now; two of them go to :meth:`elapsed_ms`."""

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds of device time from one mark to a later one. Waits for ``end`` if it is not reached yet."""

    def reset_peak_memory(self) -> None:
        """Start a new measurement of :meth:`peak_memory_bytes`, where the platform can."""

    def peak_memory_bytes(self) -> int:
        """The most memory in use at once: allocated by torch on a GPU, resident in the process on the CPU."""

    def side_stream(self) -> SideStream:
        """For work of the current device that the passes need not wait for."""


def select(name: str) -> Platform:
    """The platform called ``name``; nothing is set up yet.

    ``"auto"`` is ``cuda`` where this process sees a GPU and ``cpu`` elsewhere, and where the CPU platform is in force.

    Raises:
        UserError: for an unknown name, or ``"cuda"`` on a machine where torch sees no GPU.
    """
    if name not in NAMES:
        raise UserError(f"the device must be one of {', '.join(NAMES)}, got {name!r}; choose one of them")
    from megatron.zero_bubble.platforms.cpu import CpuPlatform, installed
    from megatron.zero_bubble.platforms.cuda import CudaPlatform

    cuda = CudaPlatform()
    if name == "cpu" or (name == "auto" and (installed() or not cuda.available())):
        return CpuPlatform()
    if not cuda.available():
        raise UserError(
            "the cuda device needs a GPU that torch can use, and this process sees none; "
            "use cpu or auto, or check the driver, CUDA_VISIBLE_DEVICES and that torch is a CUDA build"
        )
    return cuda
