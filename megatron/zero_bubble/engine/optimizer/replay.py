"""Repeats the first forwards of an iteration with the same samples, random numbers and counters."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from megatron.zero_bubble.engine.optimizer import random_state, rerun_state
from megatron.zero_bubble.engine.optimizer.log_sums import sums_for_the_log
from megatron.zero_bubble.engine.optimizer.reread import Reread, copied


class Rewindable(Reread):
    """A data iterator that, after ``rewind``, returns all items again that it has returned so far, as copies."""

    what = "post-validation"
    why = "forwards get the same items again if the optimizer step before them is rejected"
    otherwise = "drop --zero-bubble-post-validation"

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self._given: list[Any] | None = []
        self._again: deque[Any] = deque()

    def __next__(self) -> Any:
        item = self._again.popleft() if self._again else next(self._source)
        if self._given is None:
            return item
        self._given.append(item)
        return copied(item)

    def rewind(self) -> None:
        """Start again from the first item; possible once."""
        assert self._given is not None, "an iteration is repeated at most once"
        self._again, self._given = deque(self._given), None

    def keep_nothing(self) -> None:
        """Drop the returned items; ``rewind`` is not possible afterwards."""
        self._given = None


class Replay:
    """A copy of all state that the forwards of an iteration change outside their results.

    Args:
        chunks: the model chunks; forwards may update their buffers.
        iterators: the data iterator of each chunk; chunks may share one.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], iterators: Sequence[Any]) -> None:
        own = {id(source): None if source is None else Rewindable(source) for source in iterators}
        self.iterators = [own[id(source)] for source in iterators]
        self._rewindable = [iterator for iterator in own.values() if iterator is not None]
        self._random, self._checks = random_state.capture(), rerun_state.capture()
        modules = (module for chunk in chunks for module in chunk.modules())  # DDP.buffers is something else
        self._buffers = [(b, b.clone()) for module in modules for b in module._buffers.values() if b is not None]
        self._sums = {key: value.clone() for key, value in sums_for_the_log().items()}

    def rewind(self) -> None:
        """Restore all state to the beginning of the iteration."""
        for iterator in self._rewindable:
            iterator.rewind()
        random_state.restore(self._random)
        rerun_state.restore(self._checks)
        for buffer, before in self._buffers:
            buffer.copy_(before)
        for key, value in sums_for_the_log().items():
            if key in self._sums:
                value.copy_(self._sums[key])
            else:
                value.zero_()  # created by the first forwards

    def confirm(self) -> None:
        """Drop the copies, because the forwards need not be repeated."""
        for iterator in self._rewindable:
            iterator.keep_nothing()
        self._buffers.clear()
        self._sums.clear()
