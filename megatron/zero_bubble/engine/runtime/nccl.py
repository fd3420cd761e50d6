"""NCCL for transfers that overlap with passes: options of the communicators, and a warning that does not apply."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.zero_bubble.core.errors import UserError

DEFAULT_TIMEOUT = timedelta(minutes=10)
"""The default timeout of torch.distributed for NCCL."""
_UNSET = -(2**31)
"""``NCCL_CONFIG_UNDEF_INT``: NCCL's default applies."""
_CTAS = ("min_ctas", "max_ctas")
_NUM_STREAMS = 32
"""Streams of high priority that torch has per device for communicators; the next one shares that of the first."""


def options_beside_passes(pipeline: dist.ProcessGroup, max_ctas: int | None, timeout: timedelta) -> Any:
    """Options of a group whose transfers overlap with passes.

    A receive occupies its CTAs, and with them multiprocessors of the GPU, from its start until the message has arrived,
    often during a whole pass. So it gets few of them, unless the job has configured the CTAs of its pipeline. Its
    stream has high priority, because it would otherwise start after the passes that are queued already.

    Args:
        pipeline: the job's process group, whose options come from Megatron's ``--nccl-communicator-config-path``.
        max_ctas: the largest number of CTAs per transfer; None for NCCL's default.
        timeout: of the group; torch warns if it is not in the options as well.

    Returns:
        A new ``ProcessGroupNCCL.Options``, for one group: torch writes the group's name and ranks into it.
    """
    job = _options_of(pipeline).config
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    if max_ctas is not None and all(getattr(job, name) == _UNSET for name in _CTAS):
        options.config.min_ctas, options.config.max_ctas = 1, max_ctas
    for name in ("cga_cluster_size", "net_name", *_CTAS):
        if (value := getattr(job, name)) not in (_UNSET, None):
            setattr(options.config, name, value)
    return options


def _options_of(group: dist.ProcessGroup) -> Any:
    backend: Any = group._get_backend(torch.device("cuda"))
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps the backend.
    return getattr(backend, "wrapped_pg", backend).options


def check_streams(num_channels: int, of_messages: Collection[dist.ProcessGroup]) -> None:
    """Check that no communicator of this rank shares its stream with another: they would wait for each other.

    Args:
        num_channels: the channels of this rank, each of which has a communicator.
        of_messages: the groups that have these communicators.

    Raises:
        UserError: torch has fewer streams.
    """
    others = [group for group in distributed_c10d._world.pg_map if group not in of_messages and _has_priority(group)]
    if num_channels + len(others) > _NUM_STREAMS:
        raise UserError(
            f"at most {_NUM_STREAMS} communicators of NCCL with high priority can have a stream of their own per GPU, "
            f"and those that share one can deadlock; got {num_channels} for messages between stages and {len(others)} "
            "of other process groups; name fewer groups in --high-priority-stream-groups, or in the file of "
            "--nccl-communicator-config-path",
            everywhere=False,
        )


def _has_priority(group: dist.ProcessGroup) -> bool:
    try:
        return bool(getattr(_options_of(group), "is_high_priority_stream", False))
    except RuntimeError:
        return False  # the group has no backend for GPUs


def without_p2p_warning(call: Callable[[], None]) -> None:
    """Run ``call``, the first sends and receives of a group, without torch's warning that each pair of ranks gets a
    communicator of its own, which is intended here.

    torch prints the warning from C++, where only all warnings can be turned off. Inside a function of torch that turns
    such warnings into Python's, as ``apply_`` does, it can be filtered by its text.
    """
    warnings.filterwarnings("ignore", message="An unbatched P2P op")

    def run(value: float) -> float:
        call()
        return value

    torch.zeros(1, device="cpu").apply_(run)
