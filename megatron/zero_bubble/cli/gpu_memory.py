"""The memory of the GPUs of a job, and what is said where an estimate exceeds it."""

from __future__ import annotations

import argparse

from megatron.zero_bubble.cli.job_figures import gpu_bytes
from megatron.zero_bubble.core.costs.devices import DEVICES
from megatron.zero_bubble.core.costs.units import format_bytes
from megatron.zero_bubble.planning.change import Need

RESERVED = 0.1
"""The share of a GPU's memory that is left for CUDA, NCCL and fragmentation."""


def memory_of(options: argparse.Namespace) -> int:
    """The bytes of a GPU: those of ``--gpu-memory``, else those that ``--gpu`` has.

    Raises:
        UserError: as ``gpu_bytes``.
    """
    if options.gpu_memory is not None:
        return gpu_bytes(options.gpu_memory)
    return DEVICES[options.gpu].memory_gib * 2**30


def beyond(options: argparse.Namespace, need: Need) -> str | None:
    """Return the sentence for a job that needs more memory than its GPUs have; None for another.

    Args:
        options: the flags that say where it runs, and what it costs there.
        need: its memory, in bytes.
    """
    memory = memory_of(options)
    if need.most <= memory:
        return None
    gpu = f"--gpu {options.gpu}" if options.gpu_memory is None else f"--gpu-memory {options.gpu_memory}"
    amounts = f"{format_bytes(need.most)} on rank {need.fullest}, more than the {format_bytes(memory)} of {gpu}"
    if options.costs is not None:
        return (
            f"By {options.costs}, the job needs {amounts}: it does not fit, or the costs are of another job; give "
            "those that its own run has recorded, or --gpu-memory if its GPUs have more."
        )
    return (
        f"By this estimate, the job needs {amounts}: if it runs, the estimate is wrong for it, with all figures that "
        "follow from it; give --costs with a file that its run has recorded (--zero-bubble-record-costs), or "
        "--gpu-memory if its GPUs have more."
    )
