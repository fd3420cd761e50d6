"""What a job's settings say about NCCL: whether it is used, and whether its kernels start one after the other."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple


def is_nccl(backend: str) -> bool:
    """Whether a backend of torch.distributed sends the memory of GPUs by NCCL.

    Args:
        backend: its name, which is ``nccl``, ``nccl2``, ``nccl-lazy`` or ``nccl-legacy`` for the implementations that
            torch has had; or one name per type of device, as in ``cpu:gloo,cuda:nccl2``.
    """
    of_devices = dict(part.split(":", 1) for part in backend.lower().split(",") if ":" in part)
    return of_devices.get("cuda", backend.lower()).startswith("nccl")


class OneQueue(NamedTuple):
    """Why transfers of a GPU start in the order in which the host issued them.

    Attributes:
        what: the consequence.
        setting: the variable and its value.
        several: the value with which transfers start independently.
    """

    what: str
    setting: str
    several: str


def one_queue(environment: Mapping[str, str] = os.environ) -> OneQueue | None:
    """What the environment of a job says about the queues of its GPUs; None if transfers start independently.

    They start in order with one hardware queue, and if NCCL orders the kernels of all communicators. Source: the user
    guide of NCCL, "NCCL_LAUNCH_ORDER_IMPLICIT".
    """
    if environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        return OneQueue("one hardware queue per GPU", "CUDA_DEVICE_MAX_CONNECTIONS is 1", "32")
    order = environment.get("NCCL_LAUNCH_ORDER_IMPLICIT", "").strip()
    if order in ("", "0"):
        return None
    setting = f"NCCL_LAUNCH_ORDER_IMPLICIT is {order}, which has the same effect as one queue"
    return OneQueue("one order for all transfers of a GPU", setting, "0")
