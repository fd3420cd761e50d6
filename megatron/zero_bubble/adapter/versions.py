"""Handles the differences between versions of megatron-core, detected from the functions' signatures.

The minor versions 0.13 to 0.20 differ here in added and removed arguments and in the name of one class, never in the
meaning of an argument. :mod:`megatron.zero_bubble.patching.seams` lists the versions that were checked.
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
    """The parameter names of a function; None if it takes ``**kwargs``."""
    parameters = inspect.signature(function).parameters.values()
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters) else frozenset(p.name for p in parameters)


def given_to(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of ``model``, by their names in its forward, without those that were left out."""
    given = _signature(type(model).forward).bind(model, *args, **kwargs).arguments
    given.pop("self")
    return given


@functools.cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def supported_kwargs(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """The arguments that ``function`` accepts in this version; all of them if it takes ``**kwargs``."""
    names = _parameters(function)
    return arguments if names is None else {name: value for name, value in arguments.items() if name in names}


def finalize_arguments(finalize: Callable[..., Any], groups: Any, force_all_reduce: bool | None) -> dict[str, Any]:
    """The keyword arguments for ``config.finalize_model_grads_func``, in addition to chunks and tokens.

    They are those of megatron-core's own ``finalize_model_grads`` that the job's function accepts too.
    """
    of_version = supported_kwargs(
        finalize_model_grads, pg_collection=groups, grad_finalize_pgs=groups, force_all_reduce=force_all_reduce
    )
    return supported_kwargs(finalize, **of_version)


def process_groups(pg_collection: Any) -> Any:
    """The caller's process groups, or Megatron's global groups as upstream's schedules collect them."""
    if pg_collection is not None:
        return pg_collection
    build = getattr(schedules, "_build_default_pg_collection", None)  # since 0.19
    if build is not None:
        return build()
    if hasattr(process_groups_config, "ProcessGroupCollection"):  # since 0.15; has more groups than the schedules need
        return process_groups_config.ProcessGroupCollection.use_mpu_process_groups()
    # Versions 0.13 and 0.14 have one collection per purpose.
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
    """Raise UserError for arguments that belong to a pipeline of several models on separate ranks."""
    several = getattr(process_groups_config, "MultiModuleProcessGroupCollection", None)
    if p2p_communicator is not None or (several is not None and isinstance(pg_collection, several)):
        what = "a p2p_communicator" if p2p_communicator is not None else f"a {type(pg_collection).__name__}"
        raise UserError(
            "zero-bubble schedules support one model per pipeline and do their own communication; got "
            f"{what}, which is for several models on separate ranks; leave it out, or train without a zero-bubble "
            "schedule"
        )


def models_process_groups() -> Any:
    """Megatron's global process groups for a model's constructor; None if this version has no such argument."""
    for name in ("ProcessGroupCollection", "ModelCommProcessGroups"):
        if hasattr(process_groups_config, name):
            return getattr(process_groups_config, name).use_mpu_process_groups()
    return None


def skips_stages_without_embedding() -> bool:
    """Whether ``finalize_model_grads`` can be called for one stage of a rank whose other stage has a tied embedding.

    In 0.13, for example, it looks for the gradient of the embedding in the stage that it is called for.
    """
    module = inspect.getmodule(finalize_model_grads)
    return hasattr(module, "_allreduce_embedding_grad")
