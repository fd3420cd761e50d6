"""Batches of the first stage, which I reads before F does."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.zero_bubble.engine.optimizer.reread import Reread, copied


class ReadAhead(Reread):
    """A data iterator that returns the same items in the I and in the F of a microbatch; those of I are copies."""

    what = "vocabulary parallelism"
    why = "the look-up of the tokens and the forward of a microbatch get the same items"
    otherwise = "train with --zero-bubble-vocabulary-parallel off"

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self._read: dict[int, deque[Any]] = {}
        self._ahead: int | None = None
        self._again: deque[Any] = deque()

    @contextmanager
    def ahead(self, microbatch: int) -> Iterator[None]:
        """Context around the I of a microbatch: items are read, and kept for its F."""
        self._ahead, self._read[microbatch] = microbatch, deque()
        try:
            yield
        finally:
            self._ahead = None

    @contextmanager
    def again(self, microbatch: int) -> Iterator[None]:
        """Context around the F of a microbatch: the items are returned again."""
        self._again = self._read.pop(microbatch)
        yield
        assert not self._again, f"F of microbatch {microbatch} did not read all items that its I had read"

    def __next__(self) -> Any:
        if self._ahead is None:
            return self._again.popleft() if self._again else next(self._source)
        self._read[self._ahead].append(next(self._source))
        return copied(self._read[self._ahead][-1])
