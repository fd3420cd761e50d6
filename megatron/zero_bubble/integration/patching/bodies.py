"""Upstream functions whose bodies this package repeats or relies on in detail, and the versions it was compared with.

A seam detects that the arguments of a function changed, but not that upstream added a step to its body. ``bodies.json``
has a digest of each of these functions for every version whose source was compared with ours; on any other body, a job
prints a warning at its start. ``CONTRIBUTING.md`` describes how to add a version.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from megatron.zero_bubble.integration.patching.digest import digest_of

Digests = dict[str, dict[str, list[str]]]
"""Versions by digest, by function."""

TABLE = Path(__file__).with_name("bodies.json")

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_LAYERS = "megatron.core.tensor_parallel.layers"
_FINALIZE = "megatron.core.distributed.finalize_model_grads"
_CLIP = "megatron.core.optimizer.clip_grads"
_OPTIMIZER = "megatron.core.optimizer.optimizer"
_STEPS = ("step", "prepare_grads", "step_with_ready_grads")

# (module, function), grouped by the module of ours that follows them.
SCHEDULE: tuple[tuple[str, str], ...] = (
    # adapter.pipeline
    (_SCHEDULES, "forward_backward_pipelining_without_interleaving"),
    (_SCHEDULES, "forward_backward_pipelining_with_interleaving"),
    (_FINALIZE, "finalize_model_grads"),
    # adapter.boundary, adapter.stage
    (_SCHEDULES, "get_tensor_shapes"),
    (_SCHEDULES, "forward_step"),
    (_SCHEDULES, "forward_step_calc_loss"),
    (_SCHEDULES, "backward_step"),
    # wgrad.linear
    (_LAYERS, "linear_with_grad_accumulation_and_async_allreduce"),
    (_LAYERS, "LinearWithGradAccumulationAndAsyncCommunication.forward"),
    (_LAYERS, "LinearWithGradAccumulationAndAsyncCommunication.backward"),
    # wgrad.accumulate
    ("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel._make_backward_post_hook"),
    ("megatron.core.distributed.param_and_grad_buffer", "_ParamAndGradBucketGroup.register_grad_ready"),
    # adapter.placement
    (_FINALIZE, "_allreduce_word_embedding_grads"),
    ("megatron.core.parallel_state", "is_pipeline_last_stage"),
)
OPTIMIZER: tuple[tuple[str, str], ...] = (
    # optimizer.post_validation
    *((_OPTIMIZER, f"MegatronOptimizer.{name}") for name in ("get_grad_norm", "clip_grad_norm", "count_zeros")),
    *((_OPTIMIZER, f"MixedPrecisionOptimizer.{name}") for name in (*_STEPS, "_unscale_main_grads_and_check_for_nan")),
    *((_OPTIMIZER, f"FP32Optimizer.{name}") for name in _STEPS),
    *((_OPTIMIZER, f"ChainedOptimizer.{name}") for name in (*_STEPS, "get_grad_norm", "count_zeros")),
    ("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer.step_with_ready_grads"),
    (_CLIP, "clip_grad_by_total_norm_fp32"),
    (_CLIP, "get_grad_norm_fp32"),
    (_CLIP, "count_zeros_fp32"),
)


def read_table() -> Digests:
    """The digests of all compared versions."""
    return json.loads(TABLE.read_text())


def changed_bodies(version: str, watched: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield one warning per watched function whose body in the installed megatron-core was never compared.

    A body that was compared in another version is accepted: the functions that it calls are watched, too, or checked by
    a seam.
    """
    remedy = "compare the losses of some iterations with those of a run without a schedule"
    try:
        found = digests(watched, functools.cache(_source_of))
    except (OSError, SyntaxError):
        yield (
            f"the source of megatron-core {version} cannot be read, so the functions that zero-bubble training "
            f"repeats cannot be compared with the versions it was written for; {remedy}"
        )
        return
    table = read_table()
    for name, digest in found.items():
        read = table.get(name, {})
        if digest is not None and digest not in read:
            versions = sorted((of_body for versions in read.values() for of_body in versions), key=_numbers)
            near = [other for other in versions if _numbers(other)[:2] == _numbers(version)[:2]]
            yield (
                f"{name} in megatron-core {version} differs from the versions that zero-bubble training was written "
                f"for ({', '.join(near or versions) or 'none'}); {remedy}, or install one of these versions"
            )


def digests(watched: Iterable[tuple[str, str]], source_of: Callable[[str], str]) -> dict[str, str | None]:
    """Digest of each function, None if it does not exist; ``source_of`` returns the source of a module."""
    return {f"{module}.{function}": digest_of(source_of(module), function) for module, function in watched}


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"[0-9]+", version)[:3]]


def _source_of(module: str) -> str:
    return inspect.getsource(importlib.import_module(module))
