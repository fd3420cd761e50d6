"""Keys and values of earlier slices, to which the tokens of later slices attend.

The F passes of a microbatch fill one buffer per layer, slice by slice, and each attends to the rows filled so far. The
B passes run from the last slice to the first: each adds gradients to the rows of all earlier slices, and then takes the
complete gradients of its own rows. A gradient that is asked for within a forward is that of the slice's own rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron.zero_bubble.core.costs.memory import MOST_SUMMED_AS_THEY_ARE
from megatron.zero_bubble.integration.adapter.kept import KeptOfSlices


class _History:
    """Keys and values of one microbatch in one layer, in buffers for the whole sequence.

    Attributes:
        buffers: keys and values; the rows of slices whose F has not run are uninitialized.
        gradients: their gradients, from the B of the last slice on.
    """

    def __init__(self, like: tuple[torch.Tensor, torch.Tensor], length: int) -> None:
        self.buffers = tuple(rows.new_empty((length, *rows.shape[1:])) for rows in like)
        self.gradients: tuple[torch.Tensor, ...] = ()

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from (*self.buffers, *self.gradients)


class Histories(KeptOfSlices[int, _History]):
    """The keys and values of all microbatches on this rank whose backward is not complete."""

    def extend(
        self,
        of: tuple[int, int],
        layer: int,
        ends: tuple[int, ...],
        slice_: int,
        own: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the keys and values of a slice; may be repeated, because recomputation runs forwards again.

        Args:
            of: stage and microbatch.
            ends: the ends of all slices, in tokens.
            own: keys and values of the slice, (tokens, ...).

        Returns:
            keys and values of all tokens up to the end of the slice: views of the buffers.
        """
        layers = self._kept.setdefault(of, {})
        if layer not in layers:
            layers[layer] = _History(own, ends[-1])
        keys, values = _Extend.apply(*own, self, of, layer, ends, slice_)
        return keys, values

    def get(self, of: tuple[int, int], layer: int) -> _History:
        return self._kept[of][layer]


class _Extend(torch.autograd.Function):
    """Maps keys and values of a slice to those of all tokens up to its end, without copying those of earlier slices."""

    @staticmethod
    def forward(ctx: Any, keys: Any, values: Any, kept: Histories, of: Any, layer: int, ends: Any, slice_: int) -> Any:
        start, end = _bounds(ends, slice_)
        buffers = kept.get(of, layer).buffers
        for buffer, rows in zip(buffers, (keys, values), strict=True):
            # Not through autograd: earlier slices have saved views of the buffer, but of other rows.
            buffer.data[start:end] = rows
        ctx.of_slice = kept, of, layer, ends, slice_
        return tuple(buffer.data[:end] for buffer in buffers)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        kept, of, layer, ends, slice_ = ctx.of_slice
        start, end = _bounds(ends, slice_)
        if kept.in_forward:
            return *(gradient[start:end] for gradient in gradients), None, None, None, None, None
        history = kept.get(of, layer)
        if not history.gradients:  # the last slice
            wide = len(ends) > MOST_SUMMED_AS_THEY_ARE
            history.gradients = tuple(g.to(torch.float32 if wide else g.dtype, copy=True) for g in gradients)
        else:
            for total, gradient in zip(history.gradients, gradients, strict=True):
                total[:end] += gradient
        # Views: no later backward changes the rows of this slice.
        own = [total[start:end].to(g.dtype) for total, g in zip(history.gradients, gradients, strict=True)]
        if slice_ == 0:
            kept.drop_layer(of, layer)
        return *own, None, None, None, None, None


def _bounds(ends: tuple[int, ...], slice_: int) -> tuple[int, int]:
    return (ends[slice_ - 1] if slice_ else 0), ends[slice_]
