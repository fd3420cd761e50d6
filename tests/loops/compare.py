"""Run a loop under stock and under our schedules in the same processes, and compare what it reads and its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from tests.loops.loops import LOOPS, Pipeline
from tests.loops.models import destroy_groups, digests

LINE, V, INTERLEAVED = Pipeline(None, False), Pipeline(2, False), Pipeline(2, True)
SCHEDULES = {"zb-h1": LINE, "zb-v": V, "interleaved-1f1b": INTERLEAVED}
Outcome = tuple[list[Any], dict[str, str]]


def outcomes(
    rank: int, loop: str, schedules: Sequence[str], options: Mapping[str, Any] = MappingProxyType({})
) -> list[list[Outcome]]:
    """What the loop reads and its weights, for each schedule: under stock Megatron, and under the schedule.

    Stock runs 1F1B, with as many layers in all, in place of a V. ``options`` are those of :class:`Pipeline`.
    """
    stock: dict[bool, Outcome] = {}
    found = []
    for schedule in schedules:
        pipeline = SCHEDULES[schedule]._replace(options=options)
        if pipeline.is_interleaved not in stock:
            of_stock = INTERLEAVED if pipeline.is_interleaved else LINE
            stock[pipeline.is_interleaved] = run(loop, None, of_stock._replace(options=options))
        found.append([stock[pipeline.is_interleaved], run(loop, schedule, pipeline)])
    return found


def run(loop: str, schedule: str | None, pipeline: Pipeline) -> Outcome:
    """Run the loop once: what it reads, and its weights."""
    from megatron.core import parallel_state, tensor_parallel

    import megatron.zero_bubble

    destroy_groups()
    if schedule is not None:
        megatron.zero_bubble.apply(megatron.zero_bubble.ZeroBubbleConfig(schedule=schedule, fuse_wgrad=False))
    try:
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=2,
            virtual_pipeline_model_parallel_size=pipeline.virtual_size,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(7)
        seen, models = LOOPS[loop](pipeline)
        weights = {f"{name}: {weight}": digest for name in models for weight, digest in digests(models[name]).items()}
        return exact(seen), weights
    finally:
        megatron.zero_bubble.revert()
        destroy_groups()


def exact(value: Any) -> Any:
    """A value with all tensors as types, shapes and digests."""
    if isinstance(value, torch.Tensor):
        content = value.detach().contiguous().numpy().tobytes()
        return str(value.dtype), tuple(value.shape), hashlib.sha256(content).hexdigest()[:16]
    if isinstance(value, dict):
        return {key: exact(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(exact, value))
    return value


def _without_norms(seen: list[Any]) -> list[Any]:
    """What is equal between placements, which sum the parts of a norm in different orders."""
    return [each for each in seen if not (isinstance(each, dict) and "grad_norm" in each)]


def differences(results: Sequence[list[list[Outcome]]], schedules: Sequence[str]) -> list[str]:
    """Compare the outcomes of both ranks; returns what differs from stock, one line each."""
    found = []
    for schedule, (of_stock, unread), (read_by_stock, read) in zip(schedules, *results, strict=True):
        if unread[0]:
            found.append(f"{schedule}: the first rank read something")
        reads, expected = (_without_norms(each) if schedule == "zb-v" else each for each in (read[0], read_by_stock[0]))
        if not expected or reads != expected:
            found.append(f"{schedule}: the loop read other values")
        stock, ours = {**of_stock[1], **read_by_stock[1]}, {**unread[1], **read[1]}
        found += [f"{schedule}: {name} differs" for name in stock if ours.get(name) != stock[name]]
        found += [f"{schedule}: {name} is not in stock" for name in ours.keys() - stock.keys()]
    return found
