"""The CUDA platform: one GPU per rank over NCCL, or several ranks on one GPU with a new NCCL."""

from __future__ import annotations

import ctypes
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.engine.platforms.cuda_graphs import CudaGraphPool
from megatron.zero_bubble.engine.platforms.graphs import GraphPool
from megatron.zero_bubble.engine.platforms.host import HostMemory
from megatron.zero_bubble.engine.platforms.own_streams import give_stream, take_stream
from megatron.zero_bubble.engine.platforms.pools import CommonPool, MemoryPool
from megatron.zero_bubble.engine.platforms.streams import HostCopy, ThreadLane

_PERIOD_S = 0.001
"""Time between two looks at a stream whose end is awaited."""


def nccl_shares_gpus() -> bool:
    """Whether NCCL lets several ranks use one GPU: with ``NCCL_MULTI_RANK_GPU_ENABLE=1``, since NCCL 2.30.

    NCCL calls this experimental. The kernels of the ranks take turns, unless CUDA's Multi-Process Service runs them at
    the same time, so it is for tests on a machine with fewer GPUs than ranks.
    """
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and _nccl_version() >= 23000


def _nccl_version() -> int:
    """Of the library that is loaded, such as 23007; 0 without NCCL. torch tells the one that it was compiled with."""
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError:
        return 0
    version = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(version))
    return version.value


_OF_LANES = -1
"""The priority of lanes: high, because other ranks wait for their work."""


class CudaLane:
    """A ``Lane`` on a CUDA stream of its own: it must not wait for other lanes, nor for messages.

    torch's allocator need not know of the lane. Work uses memory of the passes, also for its result, only until they
    wait for this result or a later one, and the lane keeps ``uses`` until then; later passes may have it, because they
    wait as well. With ``record_stream``, memory would come back only when the GPU has proceeded so far: the further the
    host runs ahead, the more memory would be in use. Results that nobody waits for, because a pass has failed, are kept
    until the lane is joined or closed.

    Nothing follows the work in the stream: with few hardware queues, what waits for it there would hold back the
    passes.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = take_stream(device, _OF_LANES)
        self._under_way: deque[CudaResult] = deque()

    def start(self, work: Callable[[], Any], uses: Iterable[torch.Tensor]) -> CudaResult:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            result = CudaResult(work(), tuple(uses), self._stream.record_event(), self._ended)
        self._under_way.append(result)
        return result

    def _ended(self, result: CudaResult) -> None:
        """Forget a result that the passes wait for, and those before it, which have ended as well."""
        while result in self._under_way:
            self._under_way.popleft()

    def join(self) -> None:
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._under_way.clear()

    def close(self, timeout_s: float) -> bool:
        """Wait for the work of this stream only: others may wait for a rank that is lost."""
        deadline_s = time.monotonic() + timeout_s
        while not self._stream.query():
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_PERIOD_S)
        self._under_way.clear()
        give_stream(self._stream, _OF_LANES)
        return True


class CudaResult:
    """What a work item on a stream returns, and the tensors that it uses.

    ``waited`` is called with this result when the passes wait for it.
    """

    def __init__(
        self,
        made: Any,
        uses: tuple[torch.Tensor, ...],
        done: torch.cuda.Event,
        waited: Callable[[CudaResult], object],
    ) -> None:
        self._made, self._uses, self._done, self._waited = made, uses, done, waited

    def wait(self) -> Any:
        torch.cuda.current_stream().wait_event(self._done)
        self._uses = ()
        self._waited(self)
        return self._made


class PinnedMemory(HostMemory):
    """Pinned memory. Blocks are registered at their exact size, because torch's own allocator of pinned memory rounds
    up to a power of two.
    """

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        block = torch.empty(num_bytes, dtype=torch.uint8)
        runtime = torch.cuda.cudart()
        status = runtime.cudaHostRegister(block.data_ptr(), num_bytes, 0)
        if status != runtime.cudaError.success:
            raise UserError(
                f"activations in host memory need {num_bytes} bytes of pinned memory, got CUDA error {int(status)}; "
                "raise the limit of locked memory (ulimit -l), or lower the percentage of --zero-bubble-offload",
                everywhere=False,
            )
        return block

    def _release(self, block: torch.Tensor) -> None:
        torch.cuda.cudart().cudaHostUnregister(block.data_ptr())


class CudaPool:
    """A ``MemoryPool`` of torch's own allocator. It keeps its largest size until it is deleted: other allocations, and
    ``torch.cuda.empty_cache``, leave its blocks alone.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.MemPool()

    def allocate(self, work: Callable[[], None]) -> None:
        try:
            with torch.cuda.use_mem_pool(self._pool, self._device):
                work()
        except torch.OutOfMemoryError:
            # While a pool is in use, the allocator of torch 2.8 fails without freeing what others keep unused.
            torch.cuda.empty_cache()
            with torch.cuda.use_mem_pool(self._pool, self._device):
                work()


class CudaHostCopy(HostCopy):
    """A ``HostCopy`` on a stream of its own, so that neither the passes nor the host wait for one another.

    With one hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``), passes queued behind a copy start only when the copy
    can start. A copy after a collective should therefore be started right before the host waits for it.
    """

    def __init__(self, tensor: torch.Tensor, after: dist.Work | None) -> None:
        stream = _stream_for_copies(tensor.device)
        if after is None:
            stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            if after is not None:
                after.wait()  # with NCCL, only the stream waits
            # Into pageable memory, the copy would block the host.
            self._copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._copy.copy_(tensor.detach(), non_blocking=True)
            self._done = stream.record_event()
        tensor.record_stream(stream)

    def wait(self) -> torch.Tensor:
        self._done.synchronize()
        return self._copy


@cache
def _stream_for_copies(device: torch.device) -> torch.cuda.Stream:
    return take_stream(device)


class CudaPlatform:
    """The CUDA platform. Marks are CUDA events on the current stream, so timing needs no synchronization."""

    name = "cuda"
    backend = "nccl"

    def available(self) -> bool:
        """Whether torch can use a GPU in this process."""
        return torch.cuda.is_available()

    def setup(self, local_rank: int) -> torch.device:
        device = self.device(local_rank)
        torch.cuda.set_device(device)
        return device

    def device(self, local_rank: int) -> torch.device:
        # If there are more ranks than GPUs, ranks share them; training.distributed has rejected an NCCL that cannot.
        return torch.device("cuda", local_rank % self.device_count())

    def current_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def device_count(self) -> int:
        return torch.cuda.device_count()

    def num_multiprocessors(self) -> int:
        # Under CUDA's Multi-Process Service it is the share of the process.
        return torch.cuda.get_device_properties(self.current_device()).multi_processor_count

    def device_name(self) -> str:
        return torch.cuda.get_device_name()

    def describe(self) -> str:
        return f"cuda ({self.device_count()} x {self.device_name()})"

    def versions(self) -> Iterator[tuple[str, str]]:
        """What a bug report says of CUDA: pairs of name and text, also on a machine without a GPU."""
        yield "CUDA", torch.version.cuda or "torch was built without CUDA"
        if self.available():
            nccl = _nccl_version()
            yield "NCCL", f"{nccl // 10000}.{nccl // 100 % 100}.{nccl % 100}" if nccl else "not available"
            for index in range(self.device_count()):
                gpu = torch.cuda.get_device_properties(index)
                yield f"GPU {index}", f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def reached(self, mark: torch.cuda.Event) -> bool:
        # A new thread starts on GPU 0, where the query would create a context of some hundred MB.
        with torch.cuda.device(mark.device):
            return bool(mark.query())

    def elapsed_ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end)

    def reset_peak_memory(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def peak_memory_bytes(self) -> int:
        return torch.cuda.max_memory_allocated()

    def peak_reserved_bytes(self) -> int:
        return torch.cuda.max_memory_reserved()

    def spare_memory_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info()
        sharing = -(-int(os.environ.get("LOCAL_WORLD_SIZE", "1")) // self.device_count())  # ranks on this GPU
        unused = torch.cuda.memory_reserved() - torch.cuda.max_memory_allocated()
        return max(0, (free - total // 10) // sharing + unused)

    def lane(self) -> CudaLane:
        return CudaLane(self.current_device())

    def thread_lane(self) -> ThreadLane:
        # A new thread starts on GPU 0.
        return ThreadLane(partial(torch.cuda.set_device, self.current_device()))

    def host_memory(self, limit: int | None = None) -> PinnedMemory:
        return PinnedMemory(limit)

    def memory_pool(self) -> MemoryPool:
        # Other allocators have no pools: cudaMallocAsync, and those that a job plugs in.
        native = torch.cuda.get_allocator_backend() == "native"
        return CudaPool(self.current_device()) if native else CommonPool()

    def graph_pool(self, generators: Sequence[torch.Generator] = ()) -> GraphPool:
        return CudaGraphPool(generators)

    def to_host(self, tensor: torch.Tensor, after: dist.Work | None = None) -> CudaHostCopy:
        return CudaHostCopy(tensor, after)

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        # From pageable memory, the copy would wait for all earlier work on the stream, and so would the host.
        return tensor.pin_memory().to(device, non_blocking=True)
