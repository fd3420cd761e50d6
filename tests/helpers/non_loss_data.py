"""Collect the non-loss data of an evaluation, with stock megatron-core and with our schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.helpers.parity import Tokens, _build, _under_each


def collect(rank: int, flags: str, schedules: Sequence[str | None]) -> list[list[str]]:
    """Return the non-loss data that an evaluation of one model collects, per schedule; call it on a rank pool."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    start = None
    collected = []
    for args, _ in _under_each(flags, schedules):
        chunks, start = _build(args, start)

        def forward_step(batches: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            sample = next(batches)
            output = model(sample["tokens"][None], sample["position_ids"][None], None)
            return output, lambda logits, non_loss_data: logits.double().sum().item().hex() if non_loss_data else None

        num_microbatches = args.global_batch_size // args.micro_batch_size
        samples = Tokens(num_microbatches, args.seq_length, args.vocab_size)
        with torch.no_grad():
            collected.append(
                get_forward_backward_func()(
                    forward_step_func=forward_step,
                    data_iterator=[iter(samples) for _ in chunks] if len(chunks) > 1 else iter(samples),
                    model=chunks if len(chunks) > 1 else chunks[0],
                    num_microbatches=num_microbatches,
                    seq_length=args.seq_length,
                    micro_batch_size=1,
                    forward_only=True,
                    collect_non_loss_data=True,
                )
            )
    return collected
