"""What a job's settings say about NCCL: whether it is used, and whether its kernels start one after the other."""

from __future__ import annotations

import os
from collections.abc import Mapping

from megatron.zero_bubble.core.ir.queues import HardwareQueues


def is_nccl(backend: str) -> bool:
    """Whether a backend of torch.distributed sends the memory of GPUs by NCCL.

    Args:
        backend: its name, which is ``nccl``, ``nccl2``, ``nccl-lazy`` or ``nccl-legacy`` for the implementations that
            torch has had; or one name per type of device, as in ``cpu:gloo,cuda:nccl2``.
    """
    of_devices = dict(part.split(":", 1) for part in backend.lower().split(",") if ":" in part)
    return of_devices.get("cuda", backend.lower()).startswith("nccl")


QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_DEFAULT_QUEUES = 8
"""CUDA's, without ``QUEUES``."""


_FROM_BLACKWELL = "32 on Blackwell or later (before, Megatron-LM wants 1 with tensor or context parallelism)"
"""The remedy for too few hardware queues where layers are divided."""


def queues_of_job(backend: str, divides_layers: bool) -> HardwareQueues | None:
    """The hardware queues of the GPUs of a job; None if its messages do not go over NCCL.

    Args:
        backend: that of torch.distributed.
        divides_layers: whether tensor or context parallelism divides its layers.
    """
    if not is_nccl(backend):
        return None
    own = hardware_queues()
    return own._replace(several=_FROM_BLACKWELL) if own.several == "32" and divides_layers else own


def hardware_queues(environment: Mapping[str, str] = os.environ) -> HardwareQueues:
    """What the environment of a job says about the queues of its GPUs.

    If NCCL orders the kernels of all communicators, that has the effect of one queue. Sources: the environment
    variables in CUDA's programming guide; the user guide of NCCL, "NCCL_LAUNCH_ORDER_IMPLICIT".
    """
    value = environment.get(QUEUES, "").strip()
    order = environment.get("NCCL_LAUNCH_ORDER_IMPLICIT", "").strip()
    if value != "1" and order not in ("", "0"):
        setting = f"NCCL_LAUNCH_ORDER_IMPLICIT is {order}, which has the same effect as one queue"
        return HardwareQueues(1, "one order for all transfers of a GPU", setting, "0")
    number = int(value) if value.isascii() and value.isdecimal() and value != "0" else _DEFAULT_QUEUES
    shown = value or f"not set, which means {_DEFAULT_QUEUES}"
    what = "one hardware queue per GPU" if number == 1 else ""
    return HardwareQueues(number, what, f"{QUEUES} is {shown}", "32")
