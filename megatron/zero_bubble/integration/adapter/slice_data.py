"""Batches and reports of microbatches whose sequences are cut into slices.

The job reads a batch in every forward and returns a report of every loss. Slices of a microbatch get the same batch,
and their reports are merged into one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.engine.optimizer.reread import Reread, copied


class RepeatedBatches(Reread):
    """A data iterator that returns the same items for every slice of a microbatch, as copies (see ``copied``)."""

    what = "sequence slices"
    why = "all slices of a microbatch get the same items"
    otherwise = "train under a schedule without slices"

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self._items: list[Any] = []
        self._again: deque[Any] = deque()

    def begin(self, slice_: int) -> None:
        """Called before the forward of every slice; slice 0 reads new items."""
        if slice_ == 0:
            self._items.clear()
        self._again = deque(self._items)

    def end(self) -> None:
        """Called after the forward of the last slice: drop the items."""
        self._items.clear()

    def __next__(self) -> Any:
        if self._again:
            return copied(self._again.popleft())
        self._items.append(next(self._source))
        return copied(self._items[-1])


def merged(reports: Sequence[Any]) -> Any:
    """Merge the reports of the slices of a microbatch into the report of the whole sequence.

    A report is what a loss function returns last. Its numbers are sums or means over all tokens of the microbatch, of
    which each slice has the part that its own tokens contribute, so they are added. In a pair, Megatron's form of a sum
    and the number of its tokens, the second is the same for every slice and is kept.

    Raises:
        UserError: a value that is not a number, a tensor, or a pair, list or dict of them.
    """
    first = reports[0]
    if len(reports) == 1:
        return first
    if isinstance(first, dict):
        return {key: merged([report[key] for report in reports]) for key in first}
    if isinstance(first, (list, tuple)):
        parts = [merged(part) for part in zip(*reports, strict=True)]
        if len(first) == 2:
            parts[1] = first[1]
        return type(first)(parts)
    if isinstance(first, torch.Tensor):
        total = torch.stack(list(reports)).sum(dim=0)
        if total.numel() == 2:
            total.view(-1)[1] = first.view(-1)[1]
        return total
    if isinstance(first, (int, float)) and not isinstance(first, bool):
        return sum(reports)
    raise UserError(
        "with sequence slices, a loss function must report numbers, tensors or pairs (sum, number of tokens), which "
        f"can be added over the slices; got a {type(first).__name__}; report a tensor, or train without slices"
    )
