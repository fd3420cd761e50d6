"""Times the all-to-alls of experts: what megatron-core's token dispatchers send, and get back, in F and in B.

In B, an all-to-all begins when the gradient of its output is there, and ends when that of its input is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.zero_bubble.engine.measure.recorder import Recorder
from megatron.zero_bubble.engine.runtime.observer import IterationObserver
from megatron.zero_bubble.integration.patching.replaced import Replacement, around
from megatron.zero_bubble.integration.patching.seam import Seam

_METHODS = {"token_dispatch": ("dispatch", "dispatch_grad"), "token_combine": ("combine", "combine_grad")}
"""The methods, and the fields of ``ExpertParts`` that they take time for in F and in B."""


def timing(observers: Sequence[IterationObserver], seams: Sequence[Seam]) -> list[Replacement]:
    """The methods to replace so that the recorder among ``observers`` gets all-to-alls; none without a recorder.

    Args:
        seams: the methods of the installed version.
    """
    recorder = next((each for each in observers if isinstance(each, Recorder)), None)
    if recorder is None:
        return []
    return [(seam, around(functools.partial(_exchange, recorder))) for seam in seams]


def _exchange(
    recorder: Recorder, original: Callable[..., Any], dispatcher: Any, states: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    if not recorder.is_on:
        return original(dispatcher, states, *args, **kwargs)
    part, of_gradient = _METHODS[original.__name__]
    recorder.exchange_begins(part)
    result = original(dispatcher, states, *args, **kwargs)
    recorder.exchange_ends(part)
    received = result[0] if isinstance(result, tuple) else result
    if states.requires_grad and received.requires_grad:
        received.register_hook(lambda _: recorder.exchange_begins(of_gradient))
        states.register_hook(lambda _: recorder.exchange_ends(of_gradient))
    return result
