"""Handles the differences between versions of megatron-core, detected from the functions' signatures.

The minor versions 0.13 to 0.20 differ here in added and removed arguments and in the name of one class, never in the
meaning of an argument. :mod:`megatron.zero_bubble.integration.patching.seams` lists the versions that were checked.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from copy import copy
from typing import Any

import megatron.core
import torch
from megatron.core import parallel_state, process_groups_config
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import p2p_communication, schedules
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MultiTokenPredictionBlock,
    MultiTokenPredictionLayer,
)

from megatron.zero_bubble.core.errors import UserError


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str] | None:
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


def set_auxiliary_scales(config: Any, num_microbatches: int, cp_size: int, device: torch.device) -> None:
    """Set the scales of auxiliary losses as every forward does: of experts, multi-token prediction and attention."""
    calculate = getattr(schedules, "forward_step_calc_loss", None)  # since 0.14
    if calculate is None:
        _set_scales_of_0_13(config, num_microbatches, device)
        return
    quiet = copy(config)
    quiet.timers = None  # this is no forward
    calculate(None, torch.ones(1, device=device), None, quiet, None, False, num_microbatches, [], cp_size, False)


def _set_scales_of_0_13(config: Any, num_microbatches: int, device: torch.device) -> None:
    scale = torch.ones(1, device=device)
    if config.grad_scale_func is not None:
        scale = config.grad_scale_func(scale)
    parts = 1 if config.calculate_per_token_loss else num_microbatches
    if getattr(config, "num_moe_experts", None) is not None:
        MoEAuxLossAutoScaler.set_loss_scale(scale / parts)
    if getattr(config, "mtp_num_layers", None) is not None:
        MTPLossAutoScaler.set_loss_scale(scale / parts)


def predictions_roll_padding() -> bool:
    """Whether layers of multi-token prediction roll a mask of padding with their tokens, as they do since 0.18."""
    return "padding_mask" in (_parameters(MultiTokenPredictionLayer.forward) or ())


def losses_of_router(router: Any) -> list[str]:
    """The losses by which a router balances the load of its experts, in the order in which it computes them.

    None in 0.13, whose losses are functions of their own.
    """
    coefficient = getattr(router, "get_aux_loss_coeff", lambda _: 0)
    return [kind for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss") if coefficient(kind) > 0]


def check_one_model(p2p_communicator: Any, pg_collection: Any) -> None:
    """Raise UserError for arguments that belong to a pipeline of several models on separate ranks.

    Megatron-Bridge also passes, for one model, the communicator and the groups that upstream's schedules make for
    themselves; our schedules need no communicator, since they do their own communication.
    """
    several = getattr(process_groups_config, "MultiModuleProcessGroupCollection", None)
    plain = getattr(p2p_communication, "P2PCommunicator", None)
    if several is not None and isinstance(pg_collection, several):
        what = f"a {type(pg_collection).__name__}"
    elif p2p_communicator is not None and type(p2p_communicator) is not plain:
        what = f"a p2p_communicator of type {type(p2p_communicator).__name__}"
    else:
        return
    raise UserError(
        "zero-bubble schedules support one model per pipeline and do their own communication; got "
        f"{what}, which is for several models on separate ranks; leave it out, or train without a zero-bubble "
        "schedule"
    )


def check_one_pipeline(p2p_communicator: Any, groups: Any) -> None:
    """Raise UserError if the communicator that upstream would use belongs to other ranks than ``groups``."""
    if p2p_communicator is not None and p2p_communicator.pp_group is not groups.pp:
        ranks = (torch.distributed.get_process_group_ranks(each) for each in (p2p_communicator.pp_group, groups.pp))
        of_communicator, of_groups = ranks
        raise UserError(
            "the communicator of a pipeline must have the pipeline group of pg_collection, or without pg_collection "
            f"Megatron's global one; got a p2p_communicator of ranks {of_communicator} and a pipeline group of ranks "
            f"{of_groups}; pass P2PCommunicator(pp_group=pg_collection.pp, config=config)"
        )


def models_process_groups() -> Any:
    """Megatron's global process groups for a model's constructor; None if this version has no such argument."""
    for name in ("ProcessGroupCollection", "ModelCommProcessGroups"):
        if hasattr(process_groups_config, name):
            return getattr(process_groups_config, name).use_mpu_process_groups()
    return None


def groups_argument(groups: Any) -> dict[str, Any]:
    """The keyword argument with which a model's constructor takes its process groups; 0.13 has none."""
    return supported_kwargs(GPTModel, pg_collection=groups, model_comm_pgs=groups)


def skips_stages_without_embedding() -> bool:
    """Whether ``finalize_model_grads`` can be called for one stage of a rank whose other stage has a tied embedding.

    In 0.13, for example, it looks for the gradient of the embedding in the stage that it is called for.
    """
    module = inspect.getmodule(finalize_model_grads)
    return hasattr(module, "_allreduce_embedding_grad")


def layer_plans() -> Any:
    """The module that runs a forward and a backward layer by layer, with its streams set.

    Raises:
        UserError: megatron-core 0.13, which does not have it.
    """
    try:
        from megatron.core.pipeline_parallel import combined_1f1b
        from megatron.core.pipeline_parallel.utils import set_streams
    except ImportError as error:
        raise UserError(
            "schedules that hide the all-to-all of experts need megatron-core 0.14 or newer, which can run their "
            "layers in turn; upgrade it, or choose a schedule without this overlap"
        ) from error
    set_streams()
    return combined_1f1b


def paged_stash() -> Any:
    """The module of the paged stash of experts; only versions that have it have the option ``moe_paged_stash``."""
    return importlib.import_module("megatron.core.transformer.moe.paged_stash")


def end_activation_offloading(groups: Any, trains: bool) -> None:
    """End an iteration of the fine-grained offloading of activations, as upstream's schedules do it."""
    end = getattr(schedules, "_reset_activation_offload", None)  # since 0.19; also after an evaluation
    if end is not None:
        end(groups)
    elif trains:
        getattr(schedules, "off_interface").reset()  # noqa: B009 (it came with the option, in 0.16)


def nodes_with_weights(plan: Any) -> Iterator[Any]:
    """The nodes of a plan of layers whose weight gradients may run apart from them; that of attention has another name
    since 0.19.
    """
    for number in range(plan.num_layers()):
        layer = plan.get_layer(number)
        yield layer.mlp
        yield layer.attn if hasattr(layer, "attn") else layer.pre_dispatch_computation


def mamba_kernels() -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """The scan of Mamba layers, and their causal convolution; None for the latter if it is not installed."""
    mixer = importlib.import_module("megatron.core.ssm.mamba_mixer")
    return mixer.mamba_chunk_scan_combined, mixer.causal_conv1d_fn


def check_layer_plans(config: Any) -> None:
    """Raise UserError if the layer plans of this version do not support a model with experts.

    Until 0.16, they free the input of the experts after the forward. With one expert per rank it is needed in the
    backward, because the dispatched tokens are not permuted.
    """
    from megatron.core.pipeline_parallel.utils import set_streams

    experts, ranks = config.num_moe_experts, config.expert_model_parallel_size
    if "comp_stream" in (_parameters(set_streams) or ()) and experts is not None and experts // ranks == 1:
        raise UserError(
            "pairs of a forward and a backward need two experts or more per rank with megatron-core 0.14 to 0.16, "
            f"whose plans of layers free the input of a single one too early; got {experts} experts on {ranks} ranks; "
            "lower --expert-model-parallel-size, or upgrade megatron-core"
        )


def check_recomputation_in_graphs(config: Any) -> None:
    """Raise UserError if graphs of this version cannot run a forward again, which a model asks for."""
    if config.recompute_granularity is not None and not hasattr(random, "is_graph_safe_cuda_rng_tracker"):
        raise UserError(
            "CUDA graphs of stages with recomputation need megatron-core 0.16 or newer: earlier ones read random "
            f"states on the host where they recompute; got recompute_granularity={config.recompute_granularity!r}; "
            "upgrade it, or set recompute_granularity=None or cuda_graph_impl='none'"
        )


def check_divided_predictions(gpt: Any) -> None:
    """Check that a model computes the losses of multi-token prediction where it computes the others, and not in the
    layers of the predictions.

    Raises:
        UserError: the version and the remedy.
    """
    if (
        not hasattr(gpt, "_postprocess")
        or "output_layer" in inspect.signature(MultiTokenPredictionBlock.forward).parameters
    ):
        raise UserError(
            "vocabulary parallelism with multi-token prediction needs a GPTModel of megatron-core 0.14 or newer, whose "
            f"predictions do not compute their losses themselves; got a {type(gpt).__name__} of megatron-core "
            f"{megatron.core.__version__}; drop --mtp-num-layers, or train with --zero-bubble-vocabulary-parallel off"
        )
