"""The device on which the stages of a rank run."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.zero_bubble.engine.platforms import select


def device_of(chunks: Sequence[torch.nn.Module]) -> torch.device:
    """The device of the rank's parameters, or the platform's current device if the chunks have no parameters."""
    parameters = (parameter for chunk in chunks for parameter in chunk.parameters())
    first = next(parameters, None)
    return select("auto").current_device() if first is None else first.device


def keep_until_used(tensor: torch.Tensor) -> None:
    """Keep the memory of a tensor that another stream has allocated until the current stream has used it."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
