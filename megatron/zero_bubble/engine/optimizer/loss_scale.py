"""The loss scale as a number, without a wait for the device."""

from __future__ import annotations

import torch


class LossScale:
    """Reads a loss scale from the device only when it has changed.

    megatron-core keeps it in a tensor on the device, and to read that waits for all passes queued so far. But few steps
    change the scale, and those put another tensor in its place.
    """

    def __init__(self) -> None:
        self._read: tuple[torch.Tensor, int] | None = None
        self._value = 1.0

    def of(self, scale: torch.Tensor) -> float:
        """The value of ``scale``, as ``get_loss_scale`` of an optimizer returns it (one element)."""
        now = scale, scale._version  # counts changes in place
        if self._read is None or self._read[0] is not now[0] or self._read[1] != now[1]:
            self._read, self._value = now, scale.item()
        return self._value
