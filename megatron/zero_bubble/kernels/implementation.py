"""Which implementation of the ops runs on a device."""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from megatron.zero_bubble.kernels import reference

_logger = logging.getLogger(__name__)


class Kernels(NamedTuple):
    """An implementation of the ops.

    Attributes:
        ops: ``torch.ops.zero_bubble``, or the module ``kernels.reference``; the same functions.
        words: which one, and why not the other.
    """

    ops: Any
    words: str


@cache
def select(device_type: str) -> Kernels:
    """The fastest there is for ``"cpu"`` or ``"cuda"``; where that is the reference, a warning tells why, once."""
    missing = _load()
    if missing is None and not torch._C._dispatch_has_kernel_for_dispatch_key(
        "zero_bubble::wgrad_accumulate", device_type.upper()
    ):
        missing = f"they were built without {device_type.upper()}; set ZB_BUILD=cuda to see what its build lacks"
    if missing is None:
        return Kernels(torch.ops.zero_bubble, "compiled")
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        _logger.warning("weight gradients run in plain torch, because the compiled ops are not there: %s", missing)
    return Kernels(reference, f"plain torch ({missing})")


@cache
def _load() -> str | None:
    """Load csrc/'s ops into torch; returns why it cannot be."""
    spec = find_spec("megatron.zero_bubble._ops")
    if spec is None or spec.origin is None:
        return "they were not built; install with `pip install --no-build-isolation` where torch is installed"
    try:
        torch.ops.load_library(spec.origin)
    except OSError as error:  # built for another torch
        return f"{spec.origin} does not load into torch {torch.__version__} ({error}); install this package anew"
    return None
