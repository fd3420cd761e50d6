"""The losses, from the rank that has the last stage to the last rank, where Megatron's loops look for them."""

from __future__ import annotations

import io
import pickle
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron.zero_bubble.runtime.transport import new_group


class LossReports:
    """A channel of its own for them; made by all ranks of the job at the same time.

    Args:
        pipeline: the pipeline-parallel group.
        wait: until the last rank has them; else the holder goes on, and must ``settle`` some time.
    """

    def __init__(self, pipeline: dist.ProcessGroup, wait: bool, timeout: timedelta | None = None) -> None:
        self._rank, self._last, self._wait = pipeline.rank(), pipeline.size() - 1, wait
        members = dist.get_process_group_ranks(pipeline)
        self._group = new_group(members, "gloo", timeout)
        self._peers = [dist.get_group_rank(self._group, member) for member in members]
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []

    def deliver(self, reports: list[Any], holder: int, device: torch.device) -> list[Any]:
        """Every rank of the pipeline calls this after its passes.

        Returns:
            on the last rank what ``holder`` has given, its tensors on ``device``; an empty list elsewhere.
        """
        if self._rank == holder:
            self.settle()
            packed = io.BytesIO()
            _Packer(packed).dump(_moved(reports, torch.device("cpu")))
            content = torch.frombuffer(packed.getbuffer(), dtype=torch.uint8)
            for tensor in (torch.tensor([content.numel()]), content):
                self._sent.append((self._group.send([tensor], self._peers[self._last], 0), tensor))
            if self._wait:
                self.settle()
        elif self._rank == self._last:
            size = torch.empty(1, dtype=torch.int64)
            self._group.recv([size], self._peers[holder], 0).wait()
            content = torch.empty(int(size), dtype=torch.uint8)
            self._group.recv([content], self._peers[holder], 0).wait()
            return _moved(pickle.loads(content.numpy().tobytes()), device)
        return []

    @property
    def num_in_flight(self) -> int:
        """Messages not yet settled."""
        return len(self._sent)

    def settle(self) -> None:
        """Wait until the last rank has what was sent."""
        while self._sent:
            self._sent.pop()[0].wait()

    def close(self) -> None:
        """Give the group back; nothing may be under way."""
        if dist.is_initialized():
            self.settle()
            dist.destroy_process_group(self._group)


class _Packer(pickle.Pickler):
    """Tensors by their bytes: torch's own way writes a file each, milliseconds of every iteration."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor:
            return NotImplemented
        return _unpacked, (value.contiguous().flatten().view(torch.uint8).numpy().tobytes(), value.dtype, value.shape)


def _unpacked(content: bytes, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)


def _moved(value: Any, device: torch.device) -> Any:
    """``value`` with every tensor in it on ``device``, detached."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(item, device) for item in value)
    return value
