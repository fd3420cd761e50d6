"""Platforms on which passes run: ``cuda`` (NCCL) or ``cpu`` (gloo ranks without a GPU).

All higher layers use a :class:`Platform`; only this layer uses ``torch.cuda``. The CPU platform also makes
megatron-core itself run without a GPU (:mod:`megatron.zero_bubble.engine.platforms.cpu`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.engine.platforms.graphs import GraphPool
from megatron.zero_bubble.engine.platforms.host import HostMemory
from megatron.zero_bubble.engine.platforms.pools import MemoryPool
from megatron.zero_bubble.engine.platforms.streams import HostCopy, Lane

NAMES = ("cpu", "cuda", "auto")


class Platform(Protocol):
    """The device functions that training, the runtime and the measurements need.

    Attributes:
        name: ``"cpu"`` or ``"cuda"``.
        backend: the ``torch.distributed`` backend for this platform's tensors, ``"gloo"`` or ``"nccl"``.
    """

    name: str
    backend: str

    def setup(self, local_rank: int) -> torch.device:
        """Prepare the process for this platform and return its device; call this before importing megatron.core."""

    def device(self, local_rank: int) -> torch.device:
        """The device of the process with this local rank."""

    def current_device(self) -> torch.device:
        """The default device of this process."""

    def device_count(self) -> int:
        """Number of devices of this machine; 1 on the CPU platform, where all ranks share the CPU."""

    def num_multiprocessors(self) -> int | None:
        """Number of multiprocessors of the current device that this process can use; None on the CPU platform."""

    def device_name(self) -> str:
        """The name of the current device, such as that of its GPU; ``"cpu"`` on the CPU platform."""

    def describe(self) -> str:
        """A phrase for the line printed at start-up."""

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work."""

    def mark(self) -> Any:
        """Record a point in device time, for :meth:`elapsed_ms` and :meth:`reached`."""

    def reached(self, mark: Any) -> bool:
        """Whether the device has reached a mark. Does not wait; may be called in any thread."""

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds of device time between two marks. Waits for ``end`` if it is not reached yet."""

    def reset_peak_memory(self) -> None:
        """Reset the peaks, if the platform supports it; the memory allocator gives back what it keeps unused."""

    def peak_memory_bytes(self) -> int:
        """Peak memory: allocated by torch on a GPU, resident size of the process on the CPU."""

    def peak_reserved_bytes(self) -> int:
        """Peak memory including what torch's allocator keeps unused on a GPU; the same as above on the CPU."""

    def spare_memory_bytes(self) -> int:
        """What this process could allocate above its peak so far, less a tenth for fragmentation."""

    def lane(self) -> Lane:
        """A lane on the current device, for collectives and copies that run concurrently with the passes."""

    def thread_lane(self) -> Lane:
        """A lane on a thread that uses the current device, for collectives over gloo."""

    def host_memory(self, limit: int | None = None) -> HostMemory:
        """Host memory for tensors that leave the device; ``limit`` is in bytes, None for no limit."""

    def memory_pool(self) -> MemoryPool:
        """A new pool of memory on the current device; the common one where allocators have no pools."""

    def graph_pool(self, generators: Sequence[torch.Generator] = ()) -> GraphPool:
        """A new pool of memory for graphs on the current device.

        Args:
            generators: those of random numbers that the graphs draw, in addition to the default one of the device.

        Raises:
            UserError: the platform has no graphs.
        """

    def to_host(self, tensor: torch.Tensor, after: dist.Work | None = None) -> HostCopy:
        """Start to copy a tensor of this platform to host memory.

        The copy starts after ``after`` if given, otherwise after everything queued so far. Later work does not wait for
        it; until the copy has arrived, it must not change the tensor.
        """

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Copy a tensor from host memory to ``device``. The host does not wait for work queued before."""


def select(name: str) -> Platform:
    """The platform named ``name``, not set up yet.

    ``"auto"`` selects ``cuda`` if torch can use a GPU and the CPU platform is not installed, otherwise ``cpu``.

    Raises:
        UserError: an unknown name, or ``"cuda"`` if torch can use no GPU.
    """
    if name not in NAMES:
        raise UserError(f"the device must be one of {', '.join(NAMES)}; got {name!r}; choose one of them")
    from megatron.zero_bubble.engine.platforms.cpu import CpuPlatform, installed
    from megatron.zero_bubble.engine.platforms.cuda import CudaPlatform

    cuda = CudaPlatform()
    if name == "cpu" or (name == "auto" and (installed() or not cuda.available())):
        return CpuPlatform()
    if not cuda.available():
        raise UserError(
            "the cuda device needs a GPU that torch can use, and this process sees none; "
            "use cpu or auto, or check the driver, CUDA_VISIBLE_DEVICES and whether torch is a CUDA build"
        )
    return cuda
