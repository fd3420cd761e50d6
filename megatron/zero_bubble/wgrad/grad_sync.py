"""When data parallelism may reduce the gradients of a model chunk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel


def reduces_early(chunk: torch.nn.Module) -> bool:
    """Whether data parallelism reduces gradients of ``chunk`` while others are computed, so that it must be told."""
    return isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_grad_reduce


class GradSync:
    """Whether backwards of one chunk tell data parallelism that gradients are ready; off until ``enable``.

    Args:
        no_sync: the chunk's ``config.no_sync_func``, None for a model without data parallelism.
    """

    def __init__(self, no_sync: Callable[[], AbstractContextManager[Any]] | None) -> None:
        self._no_sync = no_sync or contextlib.nullcontext
        self._off: AbstractContextManager[Any] | None = None
        self.hold()

    @property
    def enabled(self) -> bool:
        return self._off is None

    def enable(self) -> None:
        """From here on the gradients of the last microbatch count as ready."""
        if self._off is not None:
            self._off.__exit__(None, None, None)
            self._off = None

    def hold(self) -> None:
        """Off again, as at the beginning: zeroing gradients has turned it on."""
        self.enable()
        self._off = self._no_sync()
        self._off.__enter__()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """For a late W of an earlier microbatch: it accumulates, but makes nothing ready."""
        with contextlib.nullcontext() if self._off is not None else self._no_sync():
            yield
