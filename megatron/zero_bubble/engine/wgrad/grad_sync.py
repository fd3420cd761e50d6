"""Controls when data parallelism may reduce the gradients of a model chunk."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel


def reduces_early(chunk: torch.nn.Module) -> bool:
    """Whether data parallelism overlaps the reduction of ``chunk``'s gradients with the backward passes."""
    return isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_grad_reduce


def reduces_now(chunk: Any) -> bool:
    """Whether the gradients of ``chunk`` are reduced as soon as they are complete: in the last microbatch."""
    return reduces_early(chunk) and any(group.is_last_microbatch for group in chunk.bucket_groups)


def _groups_of(chunk: Any) -> list[Any]:
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]


@contextlib.contextmanager
def reduced_in_order(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Context in which the reductions of all buckets start in one order, whatever the order of their gradients.

    The replicas of a bucket reduce it together, so all must start their reductions in the same order. Replicas with
    different numbers of microbatches may complete their gradients in different orders: a bucket that is complete waits
    for those before it. The last chunk comes first, as its gradients usually do, and its experts, which have replicas
    of their own, come after all else.
    """
    early = [chunk for chunk in reversed(chunks) if reduces_early(chunk)]
    waiting: deque[Any] = deque(group for chunk in early for group in _groups_of(chunk))
    complete: dict[int, Callable[[], None]] = {}

    def start(group: Any, original: Callable[..., None], **options: Any) -> None:
        complete[id(group)] = functools.partial(original, **options)
        while waiting and id(waiting[0]) in complete:
            complete.pop(id(waiting.popleft()))()

    with contextlib.ExitStack() as restored:
        for group in tuple(waiting):
            restored.callback(delattr, group, "start_grad_sync")
            group.start_grad_sync = functools.partial(start, group, group.start_grad_sync)
        yield
        assert not complete, "the gradients of a bucket are complete, but not those of one that is reduced before it"


class GradSync:
    """Switches whether gradients of one chunk count as ready for reduction; off until ``enable``.

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
        """From now on, gradients count as ready; called before the last microbatch's backward."""
        if self._off is not None:
            self._off.__exit__(None, None, None)
            self._off = None

    def hold(self) -> None:
        """Switch off again, as in the initial state; needed because zeroing the gradients switches it on."""
        self.enable()
        self._off = self._no_sync()
        self._off.__enter__()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context for a late W pass of an earlier microbatch, which accumulates gradients without making them ready."""
        with contextlib.nullcontext() if self._off is not None else self._no_sync():
            yield

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Context for the last gradient of a weight that is complete before the others of its chunk are."""
        was_enabled = self.enabled
        self.enable()
        try:
            yield
        finally:
            if not was_enabled:
                self.hold()
