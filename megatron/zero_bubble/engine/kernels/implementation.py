"""Selects the implementation of the ops for a device."""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.zero_bubble.engine.kernels import reference

_logger = logging.getLogger(__name__)

_COMPILED = "compiled"


class Kernels(NamedTuple):
    """An implementation of the ops.

    Attributes:
        ops: ``torch.ops.zero_bubble`` or the module ``kernels.reference``, which have the same functions.
        words: name of the implementation for the log and, for the reference, the reason.
    """

    ops: Any
    words: str

    @property
    def is_compiled(self) -> bool:
        return self.words == _COMPILED


@cache
def select(device_type: str) -> Kernels:
    """The fastest implementation for ``"cpu"`` or ``"cuda"``.

    If that is the reference, a process without ranks logs a warning once; ranks leave that to ``compare_ranks``.
    """
    missing = _load()
    if missing is None and not torch._C._dispatch_has_kernel_for_dispatch_key(
        "zero_bubble::wgrad_accumulate", device_type.upper()
    ):
        missing = f"built without {device_type.upper()}; install with ZB_BUILD=cuda to see what the build lacks"
    if missing is None:
        return Kernels(torch.ops.zero_bubble, _COMPILED)
    if not dist.is_initialized():
        _logger.warning("compiled ops are not available (%s); using plain torch for weight gradients", missing)
    return Kernels(reference, f"plain torch ({missing})")


def compare_ranks(device_type: str) -> None:
    """Log on rank 0 which ranks use the reference, and why: one slow stage slows down all. A collective call."""
    words: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(words, select(device_type).words)
    if dist.get_rank() == 0:
        for slow in sorted(set(words) - {_COMPILED}):
            ranks = [rank for rank, own in enumerate(words) if own == slow]
            _logger.warning("weight gradients on %s: %s", _named(ranks, len(words)), slow)


def _named(ranks: list[int], num_ranks: int) -> str:
    """A phrase for some of the ranks, with consecutive ones as a range."""
    if len(ranks) == num_ranks:
        return "all ranks"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    listed = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


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
