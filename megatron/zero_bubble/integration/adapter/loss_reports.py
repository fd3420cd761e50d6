"""Sends the losses from the rank that has the last stage to the last rank, where Megatron's loops expect them.

With them go the sums of multi-token prediction for the log, which the rank with the loss adds up.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron.zero_bubble.core.errors import PeerError
from megatron.zero_bubble.engine.optimizer.log_sums import add_predictions, drop_predictions, predictions_so_far
from megatron.zero_bubble.engine.platforms import select
from megatron.zero_bubble.engine.platforms.streams import HostCopy
from megatron.zero_bubble.engine.runtime.groups import destroy, is_alive, new_group, ranks_of, torchs
from megatron.zero_bubble.engine.runtime.transport import blaming_peers


class LossReportList(list[Any]):
    """The reports of an iteration; the tensors of a report start on their way to host memory when it is appended.

    So ``LossReports.deliver`` waits for the last loss, but not for the backwards and weight gradients queued after it.

    Attributes:
        predictions: the sums of multi-token prediction after the last report, also on their way.
    """

    def __init__(self) -> None:
        super().__init__()
        self.predictions: dict[str, HostCopy] = {}

    def append(self, report: Any) -> None:
        super().append(_to_host(report))
        self.predictions = _to_host(predictions_so_far())


class LossReports:
    """A separate channel for losses. The constructor is a collective call of all ranks of the job.

    Args:
        pipeline: the pipeline-parallel group.
        wait: whether the sender waits until the last rank has received the losses. Otherwise it continues and must
            call ``settle`` later.
    """

    def __init__(self, pipeline: dist.ProcessGroup, wait: bool, timeout: timedelta | None = None) -> None:
        self._rank, self._last, self._wait = pipeline.rank(), pipeline.size() - 1, wait
        members = ranks_of(pipeline)
        self._group = new_group(members, "gloo", timeout)
        self._peers = [dist.get_group_rank(torchs(self._group), member) for member in members]
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []

    def deliver(self, reports: LossReportList, holder: int, device: torch.device, trains: bool = True) -> list[Any]:
        """Send ``reports`` from rank ``holder`` to the last rank. Every pipeline rank calls this after its passes.

        Args:
            reports: those of this iteration, on ``holder``.
            trains: whether an optimizer step follows, at the end of which the job calls ``settle``.

        Returns:
            on the last rank, the reports of ``holder`` with tensors on ``device``; on other ranks, an empty list.
        """
        group = torchs(self._group)
        if self._rank == holder:
            self.settle()
            packed = io.BytesIO()
            content = list(reports), reports.predictions
            _Packer(packed).dump(_replaced(content, HostCopy, lambda copy: copy.wait()))
            drop_predictions()
            message = torch.frombuffer(packed.getbuffer(), dtype=torch.uint8)
            for tensor in (torch.tensor([message.numel()]), message):
                self._sent.append((group.send([tensor], self._peers[self._last], 0), tensor))
            if self._wait or not trains:
                self.settle()
        elif self._rank == self._last:
            with blaming_peers(_late):
                size = torch.empty(1, dtype=torch.int64)
                group.recv([size], self._peers[holder], 0).wait()
                message = torch.empty(int(size), dtype=torch.uint8)
                group.recv([message], self._peers[holder], 0).wait()
            to_device = select(device.type).to_device
            received, predictions = _replaced(
                pickle.loads(message.numpy().tobytes()), torch.Tensor, lambda on_host: to_device(on_host, device)
            )
            add_predictions(predictions)
            return list(received)
        return []

    @property
    def is_connected(self) -> bool:
        """Whether the process group still exists; a job may have destroyed it."""
        return is_alive(self._group)

    @property
    def num_in_flight(self) -> int:
        """Number of sent messages that are not yet known to be received."""
        return len(self._sent)

    def settle(self) -> None:
        """Wait until the last rank has received all messages."""
        with blaming_peers(_late):
            while self._sent:
                self._sent.pop()[0].wait()

    def forget(self) -> None:
        """Wait for no message, because its iteration has failed; the groups must be ``cut``."""
        self._sent.clear()

    def close(self) -> None:
        """Wait for all messages and destroy the process group."""
        if dist.is_initialized():
            self.settle()
        destroy(self._group)


def _late(reason: str) -> PeerError:
    return PeerError(
        f"the losses did not get from the rank of the last stage to the last rank ({reason}); a rank has failed or "
        "hangs: look for the first error of the other ranks"
    )


class _Packer(pickle.Pickler):
    """Pickles tensors as raw bytes; torch's reducer writes a zip archive per tensor, which costs milliseconds."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor:
            return NotImplemented
        content = value.detach().cpu().contiguous().flatten().view(torch.uint8)
        return _unpacked, (content.numpy().tobytes(), value.dtype, value.shape)


def _unpacked(content: bytes, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)


def _to_host(value: Any) -> Any:
    return _replaced(value, torch.Tensor, lambda tensor: select(tensor.device.type).to_host(tensor))


def _replaced(value: Any, of_type: type, new: Callable[[Any], Any]) -> Any:
    """A copy of ``value`` with ``new(part)`` for every part of a type, in dicts, lists and (named) tuples."""
    if isinstance(value, of_type):
        return new(value)
    if isinstance(value, dict):
        return {key: _replaced(item, of_type, new) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_replaced(item, of_type, new) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
