"""Process groups and random states, which make a process that torchrun started a rank of the parallel layout."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy
import torch
import torch.distributed as dist

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.layout import embedding_stages
from megatron.zero_bubble.engine.platforms import Platform
from megatron.zero_bubble.engine.platforms.cuda import nccl_shares_gpus
from megatron.zero_bubble.engine.runtime.backends import is_nccl
from megatron.zero_bubble.planning.job.arguments.checks import refuse_nccl_on_cpu
from pretrain.process import Launch


def check_backend(backend: str, platform: Platform, launch: Launch) -> None:
    """Check that ``backend`` can send this platform's tensors between the processes of this machine.

    Raises:
        UserError: NCCL without one GPU per process of this machine, unless it lets processes share GPUs; gloo, which
            cannot sum the gradients of GPUs.
    """
    if not is_nccl(backend):
        if platform.name == "cuda":
            raise UserError(
                f"the backend {backend} cannot sum gradients on GPUs; leave out --distributed-backend, or train on CPU "
                "ranks with --zero-bubble-device cpu"
            )
        return
    if platform.name != "cuda":
        refuse_nccl_on_cpu()
    if launch.local_world_size > platform.device_count() and not nccl_shares_gpus():
        raise UserError(
            "nccl needs one GPU per process on every machine, got "
            f"{launch.local_world_size} processes and {platform.device_count()} GPUs; start fewer processes, let "
            "them share GPUs with NCCL 2.30 or newer and NCCL_MULTI_RANK_GPU_ENABLE=1, or train on CPU ranks with "
            "--zero-bubble-device cpu"
        )


def initialize(
    args: argparse.Namespace, launch: Launch, backend: str, joined: Callable[[], None] = lambda: None
) -> None:
    """Join the process group, call ``joined``, create the parallel groups and seed all random states."""
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    if dist.is_initialized():
        pass  # the calling program has already initialized torch.distributed
    elif launch.under_torchrun:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
    joined()
    lay_out(args)
    seed(args)


def group_of_hosts(args: argparse.Namespace) -> dist.ProcessGroup:
    """A new gloo group of all ranks, for what the hosts exchange without their GPUs; a collective call."""
    return dist.new_group(backend="gloo", timeout=timedelta(minutes=args.distributed_timeout_minutes))


def lay_out(args: argparse.Namespace) -> None:
    """Create megatron-core's parallel groups; a collective call."""
    from megatron.core import parallel_state
    from megatron.core.rerun_state_machine import RerunMode, initialize_rerun_state_machine

    from megatron.zero_bubble.integration.adapter.placement import embedding_ranks

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        get_embedding_ranks=embedding_ranks(args.placement, embedding_stages(args, args.placement.num_stages)),
        create_gloo_process_groups=False,
    )
    # DDP reports NaN gradients through this object. Only Megatron's loop re-runs iterations to detect faulty hardware.
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)


def seed(args: argparse.Namespace) -> None:
    """Seed all random states with ``--seed`` plus 100 times the pipeline rank, as Megatron does, so stages differ."""
    from megatron.core import parallel_state, tensor_parallel

    of_rank = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(of_rank)
    numpy.random.seed(of_rank)
    torch.manual_seed(of_rank)
    # Random numbers that a CUDA graph draws need states on the device.
    more = {} if args.cuda_graph_impl == "none" else {"use_cudagraphable_rng": True}
    tensor_parallel.model_parallel_cuda_manual_seed(of_rank, **more)


def gather(value: Any) -> list[Any]:
    """The ``value`` of every rank, in rank order; a collective call."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def agree(problem: str | None) -> None:
    """Raise the same error on every rank if any rank has a ``problem``; a collective call.

    Raises:
        UserError: with the problem of the lowest rank that has one.
    """
    for text in gather(problem):
        if text is not None:
            raise UserError(text)


def describe_rank() -> str:
    """``rank 3 (pipeline rank 1, tensor rank 0, data rank 1)`` for messages, after :func:`lay_out`."""
    from megatron.core import parallel_state

    return (
        f"rank {dist.get_rank()} (pipeline rank {parallel_state.get_pipeline_model_parallel_rank()}, tensor rank "
        f"{parallel_state.get_tensor_model_parallel_rank()}, data rank {parallel_state.get_data_parallel_rank()})"
    )
