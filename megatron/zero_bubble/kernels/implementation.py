"""Selects the implementation of the ops for a device."""

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
        ops: ``torch.ops.zero_bubble`` or the module ``kernels.reference``, which have the same functions.
        words: name of the implementation for the log and, for the reference, the reason.
    """

    ops: Any
    words: str


@cache
def select(device_type: str) -> Kernels:
    """The fastest implementation for ``"cpu"`` or ``"cuda"``; logs a warning once if that is the reference."""
    missing = _load()
    if missing is None and not torch._C._dispatch_has_kernel_for_dispatch_key(
        "zero_bubble::wgrad_accumulate", device_type.upper()
    ):
        missing = f"built without {device_type.upper()}; install with ZB_BUILD=cuda to see what the build lacks"
    if missing is None:
        return Kernels(torch.ops.zero_bubble, "compiled")
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        _logger.warning("compiled ops are not available (%s); using plain torch for weight gradients", missing)
    return Kernels(reference, f"plain torch ({missing})")


@cache
def _load() -> str | None:
    """Load the ops of csrc/ into torch. Returns None, or the reason if they cannot be loaded."""
    spec = find_spec("megatron.zero_bubble._ops")
    if spec is None or spec.origin is None:
        return "not built; install with `pip install --no-build-isolation` in an environment that has torch"
    try:
        torch.ops.load_library(spec.origin)
    except OSError as error:  # built for another torch
        return f"{spec.origin} does not load into torch {torch.__version__} ({error}); reinstall this package"
    return None
