"""Build the GPT from the flags: megatron-core's ``GPTModel`` in its DDP wrapper, its optimizer and LR scheduler."""

from __future__ import annotations

import argparse
import dataclasses
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.integration.adapter.placement import (
    as_pipeline_rank,
    copy_embedding,
    groups_as,
    megatron_rank,
)
from megatron.zero_bubble.integration.adapter.vocabulary.shards import shard_vocabulary
from megatron.zero_bubble.planning.job.arguments.model_checks import check_biases_of_experts
from pretrain.packing import PackedAttention

# Megatron's default for parameters per gradient bucket: at least 40 million, and 1 million per data-parallel rank.
_SMALLEST_BUCKET = 40_000_000
_BUCKET_PER_RANK = 1_000_000


def build_config(args: argparse.Namespace, device: torch.device) -> TransformerConfig:
    """Build megatron-core's configuration from the flags; a flag with the name of a field sets that field.

    Raises:
        UserError: an invalid combination of flags; where megatron-core rejects it, the message quotes its error.
    """
    dtype = params_dtype(args)
    engine = uses_transformer_engine(args, device)
    fields = _by_name(TransformerConfig, args)
    fields.update(
        params_dtype=dtype,
        pipeline_dtype=dtype,
        autocast_dtype=dtype,
        deallocate_pipeline_outputs=True,
        transformer_impl="transformer_engine" if engine else "local",
        attention_backend=AttnBackend[args.attention_backend],
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        overlap_p2p_comm=args.overlap_p2p_comm and args.virtual_pipeline_model_parallel_size is not None,
        recompute_granularity="selective" if args.recompute_activations else args.recompute_granularity,
        bias_activation_fusion=(
            args.bias_swiglu_fusion if args.swiglu else args.bias_gelu_fusion and args.add_bias_linear
        ),
        # Fusions are turned off where their kernels (from TransformerEngine or Apex) are not installed.
        masked_softmax_fusion=args.masked_softmax_fusion and _installed("scaled_masked_softmax_cuda"),
        apply_rope_fusion=args.apply_rope_fusion and engine,
        persist_layer_norm=args.persist_layer_norm and (engine or _installed("apex")),
        gradient_accumulation_fusion=args.gradient_accumulation_fusion and _installed("fused_weight_gradient_mlp_cuda"),
    )
    if args.cuda_graph_impl == "local" and "cuda_graph_impl" not in fields:  # until 0.14
        fields["enable_cuda_graph"] = True
    fields["batch_p2p_comm"] = not fields["overlap_p2p_comm"]
    fields["ffn_hidden_size"] = _ffn_hidden_size(args)
    if args.num_moe_experts:
        fields["moe_ffn_hidden_size"] = args.moe_ffn_hidden_size or fields["ffn_hidden_size"]
        check_biases_of_experts(args, engine)
    if args.swiglu:
        fields.update(gated_linear_unit=True, activation_func=torch.nn.functional.silu)
    elif args.squared_relu:
        from megatron.core.activations import squared_relu

        fields.update(activation_func=squared_relu, bias_activation_fusion=False)
    try:
        config = TransformerConfig(**fields)
    except (ValueError, AssertionError, IndexError) as error:  # IndexError: a layout without layers
        raise UserError(
            f"megatron-core rejects this combination of flags: {' '.join(str(error).split())}; change one of them"
        ) from error
    if config.virtual_pipeline_model_parallel_size != args.virtual_pipeline_model_parallel_size:
        raise UserError(
            f"--pipeline-model-parallel-layout has {config.virtual_pipeline_model_parallel_size} stages per rank, got "
            f"--num-virtual-stages-per-pipeline-rank {args.virtual_pipeline_model_parallel_size}; make them equal"
        )
    return config


def _ffn_hidden_size(args: argparse.Namespace) -> int:
    """``--ffn-hidden-size``; default: 4 * hidden size, with ``--swiglu`` 2/3 of that, floored to a multiple of 64."""
    if args.ffn_hidden_size is not None:
        return args.ffn_hidden_size
    wide = 4 * args.hidden_size
    return int(wide * 2 / 3 / 64) * 64 or wide if args.swiglu else wide


def params_dtype(args: argparse.Namespace) -> torch.dtype:
    """Data type of the parameters and of the tensors sent between stages."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32


def uses_transformer_engine(args: argparse.Namespace, device: torch.device) -> bool:
    """Whether to use TransformerEngine layers; without ``--transformer-impl``, if it is installed and runs on a GPU."""
    if args.transformer_impl is not None:
        return args.transformer_impl == "transformer_engine"
    return device.type == "cuda" and _installed("transformer_engine")


def build_model(
    args: argparse.Namespace, config: TransformerConfig, vocab_size: int, device: torch.device
) -> list[DistributedDataParallel]:
    """Build this rank's model chunks on ``device``, each wrapped in DDP.

    Args:
        vocab_size: size of the embedding, including padding.
    """
    rank = parallel_state.get_pipeline_model_parallel_rank()
    stages = args.placement.stages_of(rank)
    chunks: list[torch.nn.Module] = []
    for chunk in range(len(stages)):
        rank_of_chunk = megatron_rank(args.placement, rank, chunk)
        with as_pipeline_rank(rank_of_chunk):
            module: torch.nn.Module = build_chunk(
                args, config, vocab_size, chunk if len(stages) > 1 else None, groups_as(rank_of_chunk)
            )
        for parameter in module.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        chunks.append(module.to(device))
    if device.type == "cuda":
        torch.cuda.synchronize()  # with CUDA graphs, megatron-core makes layers on another stream than embeddings
    if args.source is not None and args.source.setup.vocabulary is not None:
        shard_vocabulary(chunks, args.placement)
    if args.bf16 or args.fp16:
        chunks = [Float16Module(config, module) for module in chunks]
    copy_embedding(chunks)
    ddp_config = build_ddp_config(args)
    return [
        # Later chunks are reduced while earlier ones still compute, so only the first gains from several buckets.
        DistributedDataParallel(config, ddp_config, module, disable_bucketing=chunk > 0)
        for chunk, module in enumerate(chunks)
    ]


def build_chunk(
    args: argparse.Namespace,
    config: TransformerConfig,
    vocab_size: int,
    vp_stage: int | None,
    groups: ProcessGroupCollection,
) -> GPTModel:
    """Build one stage: contiguous layers, with the embedding on the first stage and the output layer on the last."""
    model = GPTModel(
        config=config,
        transformer_layer_spec=_layer_spec(args, config, vp_stage),
        vocab_size=vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        pg_collection=groups,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        vp_stage=vp_stage,
    )
    model.vp_stage = vp_stage
    return model


def _layer_spec(args: argparse.Namespace, config: TransformerConfig, vp_stage: int | None) -> Any:
    engine = config.transformer_impl == "transformer_engine"
    if args.num_moe_experts:
        spec = get_gpt_decoder_block_spec(config, engine, normalization=args.normalization, vp_stage=vp_stage)
        layers = spec.layer_specs
    elif engine:
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=args.qk_layernorm)
    else:
        spec = get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization)
        layers = [spec]
    if args.run.balance is not None and not engine:
        for layer in layers:
            layer.submodules.self_attention.submodules.core_attention = PackedAttention
    return spec


def build_ddp_config(args: argparse.Namespace) -> DistributedDataParallelConfig:
    """Build DDP's configuration, which sets the gradient buckets and their reduction."""
    fields = _by_name(DistributedDataParallelConfig, args)
    fields["grad_reduce_in_fp32"] = not args.grad_reduce_in_bf16
    fields["check_for_nan_in_grad"] = args.check_for_nan_in_loss_and_grad
    if not args.overlap_grad_reduce:
        fields["bucket_size"] = None
    elif args.bucket_size is None:
        ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        fields["bucket_size"] = max(_SMALLEST_BUCKET, _BUCKET_PER_RANK * ranks)
    return DistributedDataParallelConfig(**fields)


def build_optimizer(args: argparse.Namespace, model: list[DistributedDataParallel]) -> MegatronOptimizer:
    """Build megatron-core's optimizer, with ``--use-distributed-optimizer`` sharded over the data-parallel ranks."""
    fields = _by_name(OptimizerConfig, args)
    fields["params_dtype"] = params_dtype(args)
    return get_megatron_optimizer(OptimizerConfig(**fields), model, use_gloo_process_groups=False)


def build_scheduler(args: argparse.Namespace, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Build the learning-rate scheduler, which counts consumed samples."""
    samples = args.batch_sizes.samples_after
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=samples(args.lr_warmup_iters),
        lr_decay_steps=samples(args.lr_decay_iters),
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=samples(args.train_iters),
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def connect(args: argparse.Namespace, model: list[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    """Set the callbacks by which schedules scale losses and synchronize gradients, as Megatron's loop does."""
    config = get_model_config(model[0])
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if args.overlap_grad_reduce:
        config.no_sync_func = _one_or_all([chunk.no_sync for chunk in model])
        if args.align_grad_reduce:
            config.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in model])
    if args.overlap_param_gather and args.align_param_gather and len(model) > 1:
        config.param_sync_func = [chunk.start_param_sync for chunk in model]


def _one_or_all(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions


def _by_name(config_class: type, args: argparse.Namespace) -> dict[str, Any]:
    """Flags with the names of fields of ``config_class``; a flag that is None is left out, so the default applies."""
    names = (field.name for field in dataclasses.fields(config_class))
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


def _installed(module: str) -> bool:
    return find_spec(module) is not None
