"""Megatron's steps around the passes of a training iteration: gradients are finished and reduced."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules

from megatron.zero_bubble.engine.wgrad.grad_sync import GradSync
from megatron.zero_bubble.integration.adapter.prepared import PreparedPlan
from megatron.zero_bubble.integration.adapter.stage import StepResults
from megatron.zero_bubble.integration.adapter.versions import finalize_arguments, supported_kwargs

Finalize = Callable[[list[torch.nn.Module], torch.Tensor | None], None]
"""Megatron's steps for the gradients of some chunks, given the number of tokens of a per-token loss."""


@contextlib.contextmanager
def finalized(
    config: Any,
    groups: Any,
    prepared: PreparedPlan,
    chunks: list[torch.nn.Module],
    results: StepResults,
    force_all_reduce: bool | None,
    finalizing: Iterable[Callable[[Finalize], Finalize]] = (),
) -> Iterator[None]:
    """Context around all passes of a training step, with Megatron's steps before and after them.

    Args:
        finalizing: each returns what runs in place of the last step, which it may call for some chunks at a time.
    """
    if config.finalize_model_grads_func is None:
        yield
        return
    clear, finish = schedules.clear_embedding_activation_buffer, schedules.finish_embedding_wgrad_compute
    embedding = clear(config, chunks[-1], **supported_kwargs(clear, is_last_stage=prepared.has_last_stage))
    yield
    finish(config, embedding, **supported_kwargs(finish, is_last_stage=prepared.has_last_stage, tp_group=groups.tp))
    num_tokens = results.num_tokens if config.calculate_per_token_loss else None
    if num_tokens is not None and prepared.last_stage_rank != groups.pp.size() - 1:
        # Megatron broadcasts the count from the last rank, but here the rank of the last stage has it.
        dist.broadcast(num_tokens, dist.get_global_rank(groups.pp, prepared.last_stage_rank), group=groups.pp)
    finalize = config.finalize_model_grads_func
    run: Finalize = functools.partial(finalize, **finalize_arguments(finalize, groups, force_all_reduce))
    for around in finalizing:
        run = around(run)
    run(chunks, num_tokens)


@contextlib.contextmanager
def timed(config: Any) -> Iterator[None]:
    """Context that Megatron's timer measures; the timer is stopped after an exception, too."""
    if config.timers is None:
        yield
        return
    timer = config.timers("forward-backward", log_level=1)
    timer.start(barrier=config.barrier_with_L1_time)
    try:
        yield
    finally:
        timer.stop()


def per_chunk(functions: Any, num_chunks: int) -> list[Any]:
    """One function per chunk. Megatron's config has a single function for one chunk and a list for several."""
    return list(functions) if isinstance(functions, (list, tuple)) else [functions] * num_chunks


def finish_grad_sync(config: Any, chunks: Sequence[torch.nn.Module], syncs: list[GradSync]) -> None:
    """Start the gradient reductions that no backward pass has started."""
    grad_syncs = per_chunk(config.grad_sync_func, len(chunks))
    for chunk, sync, grad_sync in zip(chunks, syncs, grad_syncs, strict=True):
        if not sync.enabled:
            sync.enable()
            if grad_sync is not None:
                grad_sync(chunk.parameters())
