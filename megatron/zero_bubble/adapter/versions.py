"""What the versions of megatron-core do not agree on, read off the functions themselves.

The minors 0.13 to 0.20 differ here in arguments that came or went and in the name of one class, never in what an
argument means. :mod:`megatron.zero_bubble.patching.seams` says which minors were checked.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state, process_groups_config
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import schedules

from megatron.zero_bubble.errors import UserError


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str] | None:
    """The names that a function takes; None where it takes any."""
    parameters = inspect.signature(function).parameters.values()
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters) else frozenset(p.name for p in parameters)


def supported_kwargs(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Those of the arguments that this version's function has: all of them where it takes ``**kwargs``."""
    names = _parameters(function)
    return arguments if names is None else {name: value for name, value in arguments.items() if name in names}


def finalize_arguments(finalize: Callable[..., Any], groups: Any, force_all_reduce: bool | None) -> dict[str, Any]:
    """What upstream's schedules hand to ``config.finalize_model_grads_func`` beside chunks and tokens: what
    megatron-core's own such function takes, as far as the job's takes it.
    """
    of_version = supported_kwargs(
        finalize_model_grads, pg_collection=groups, grad_finalize_pgs=groups, force_all_reduce=force_all_reduce
    )
    return supported_kwargs(finalize, **of_version)


def process_groups(pg_collection: Any) -> Any:
    """The caller's process groups, or Megatron's global ones as upstream's schedules collect them."""
    if pg_collection is not None:
        return pg_collection
    build = getattr(schedules, "_build_default_pg_collection", None)  # since 0.19
    if build is not None:
        return build()
    if hasattr(process_groups_config, "ProcessGroupCollection"):  # since 0.15; it holds more than the schedules' own
        return process_groups_config.ProcessGroupCollection.use_mpu_process_groups()
    # The collections of 0.13 and 0.14 are one for each purpose.
    names = ("GradFinalizeProcessGroups", "ModelCommProcessGroups")
    groups = next(getattr(process_groups_config, name) for name in names if hasattr(process_groups_config, name))()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
    return groups


def check_one_model(p2p_communicator: Any, pg_collection: Any) -> None:
    """Raises UserError for what a caller has of a pipeline of several models, each on ranks of its own."""
    several = getattr(process_groups_config, "MultiModuleProcessGroupCollection", None)
    if p2p_communicator is not None or (several is not None and isinstance(pg_collection, several)):
        what = "a p2p_communicator" if p2p_communicator is not None else f"a {type(pg_collection).__name__}"
        raise UserError(
            "zero-bubble schedules run one model on one pipeline and do their own communication; got "
            f"{what}, which is for models on separate ranks; leave it out, or train without a schedule"
        )


def models_process_groups() -> Any:
    """Megatron's global process groups as a model takes them; None where models ask for each of them themselves."""
    for name in ("ProcessGroupCollection", "ModelCommProcessGroups"):
        if hasattr(process_groups_config, name):
            return getattr(process_groups_config, name).use_mpu_process_groups()
    return None
