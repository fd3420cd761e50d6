"""Where the stages of a rank compute."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.zero_bubble.platforms import select


def device_of(chunks: Sequence[torch.nn.Module]) -> torch.device:
    """The device of the rank's parameters; without any (a stage may have none), the platform's current device."""
    parameters = (parameter for chunk in chunks for parameter in chunk.parameters())
    first = next(parameters, None)
    return select("auto").current_device() if first is None else first.device
