"""Upstream names that are used but not replaced; they are checked before a job starts, not in its first iteration.

``tests/integration/patching/test_used.py`` checks that none is missing here. Names that some versions lack are looked
up by
:mod:`megatron.zero_bubble.integration.adapter.versions` instead.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron.zero_bubble.integration.patching.seam import Used


def look_up(names: Iterable[Used]) -> None:
    """Check that all names exist.

    Raises:
        SeamError: a name is missing or takes other arguments; only the first one is reported.
    """
    for name in names:
        name.check()


def _of(module: str, names: str, holder: str = "") -> tuple[Used, ...]:
    """Names of a module, or of a class in it."""
    return tuple(Used(module, f"{holder}.{name}" if holder else name) for name in names.split())


def _function(module: str, name: str, parameters: str) -> Used:
    return Used(module, name, tuple(parameters.split()))


_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_PARALLEL_STATE = "megatron.core.parallel_state"
_RANDOM = "megatron.core.tensor_parallel.random"
_DISTRIBUTED = "megatron.core.distributed"
_OPTIMIZER = "megatron.core.optimizer"

USED: tuple[Used, ...] = (
    # passes
    _function(
        _SCHEDULES,
        "forward_step",
        "forward_step_func data_iterator model num_microbatches input_tensor forward_data_store config "
        "collect_non_loss_data checkpoint_activations_microbatch is_first_microbatch current_microbatch vp_stage",
    ),
    _function(_SCHEDULES, "backward_step", "input_tensor output_tensor output_tensor_grad config"),
    _function(_SCHEDULES, "check_first_val_step", "first_val_step forward_only cond"),
    _function(_SCHEDULES, "deallocate_output_tensor", "out deallocate_pipeline_outputs"),
    _function(_SCHEDULES, "get_tensor_shapes", "seq_length micro_batch_size decoder_seq_length config"),
    _function(_SCHEDULES, "clear_embedding_activation_buffer", "config model"),
    _function(_SCHEDULES, "finish_embedding_wgrad_compute", "config embedding_module"),
    _function("megatron.core.utils", "get_attr_wrapped_model", "model attr return_model_obj"),
    *_of("megatron.core.utils", "get_model_config get_model_type"),
    *_of("megatron.core.transformer.moe.moe_utils", "main_loss_backward_scale set_loss_scale", "MoEAuxLossAutoScaler"),
    *_of("megatron.core.transformer.multi_token_prediction", "set_loss_scale", "MTPLossAutoScaler"),
    *_of(
        "megatron.core.transformer",
        "attention_dropout barrier_with_L1_time calculate_per_token_loss deallocate_pipeline_outputs "
        "expert_model_parallel_size finalize_model_grads_func grad_scale_func grad_sync_func hidden_dropout "
        "no_sync_func num_microbatches_with_partial_activation_checkpoints moe_aux_loss_coeff "
        "moe_router_load_balancing_type moe_z_loss_coeff mtp_num_layers num_moe_experts pipeline_dtype "
        "sequence_parallel timers variable_seq_lengths",
        "TransformerConfig",
    ),
    # ranks and stages
    *_of(
        _PARALLEL_STATE,
        "_MPU_PIPELINE_MODEL_PARALLEL_RANK set_pipeline_model_parallel_rank get_pipeline_model_parallel_rank "
        "get_pipeline_model_parallel_group get_tensor_model_parallel_group get_tensor_model_parallel_rank "
        "get_context_parallel_group get_data_parallel_rank get_expert_model_parallel_group "
        "get_expert_tensor_and_model_parallel_group get_virtual_pipeline_model_parallel_world_size",
    ),
    _function(_PARALLEL_STATE, "get_embedding_group", "check_initialized"),
    _function(_PARALLEL_STATE, "get_position_embedding_group", "check_initialized"),
    _function(_PARALLEL_STATE, "get_data_parallel_group", "with_context_parallel partial_data_parallel"),
    *_of(
        "megatron.core.models.gpt",
        "pre_process post_process share_embeddings_and_output_weights shared_embedding_or_output_weight "
        "sharded_state_dict",
        "GPTModel",
    ),
    *_of(
        "megatron.core.transformer.pipeline_parallel_layer_layout",
        "get_num_stages_from_str layout pipeline_model_parallel_size virtual_pipeline_model_parallel_size",
        "PipelineParallelLayerLayout",
    ),
    # slices of sequences
    *_of("megatron.core.models.common.embeddings.rotary_pos_embedding", "RotaryEmbedding"),
    *_of("megatron.core.transformer.dot_product_attention", "DotProductAttention"),
    *_of("megatron.core.transformer.enums", "AttnMaskType"),
    *_of("megatron.core.transformer.identity_op", "IdentityOp"),
    *_of("megatron.core.transformer.moe.router", "TopKRouter"),
    *_of("megatron.core.transformer.attention", "SelfAttention"),
    *_of("megatron.core.transformer.mlp", "MLP"),
    *_of("megatron.core.transformer.transformer_layer", "TransformerLayer"),
    *_of(
        "megatron.core.transformer",
        "context_parallel_size fp8 hidden_size params_dtype tensor_model_parallel_size",
        "TransformerConfig",
    ),
    # vocabulary parallelism
    *_of(
        "megatron.core.models.gpt",
        "compute_language_model_loss config embedding output_layer vocab_size",
        "GPTModel",
    ),
    *_of(
        "megatron.core.tensor_parallel",
        "gather_from_sequence_parallel_region reduce_from_tensor_model_parallel_region "
        "reduce_scatter_to_sequence_parallel_region scatter_to_sequence_parallel_region "
        "set_tensor_model_parallel_attributes",
    ),
    *_of("megatron.core.transformer.multi_token_prediction", "MultiTokenPredictionBlock MultiTokenPredictionLayer"),
    # recomputation
    *_of(_RANDOM, "CheckpointFunction _fork_rng _set_all_rng_states"),
    *_of("megatron.core.tensor_parallel.utils", "gather_split_1d_tensor"),
    *_of("megatron.core.transformer.module", "Float16Module MegatronModule"),
    *_of("megatron.core.dist_checkpointing", "from_rank_offsets", "ShardedTensor"),
    *_of("megatron.core.dist_checkpointing.mapping", "ShardedObject"),
    # graphs of stages
    *_of("megatron.core.transformer.transformer_block", "pre_process input_tensor", "TransformerBlock"),
    *_of("megatron.core.transformer", "cuda_graph_warmup_steps recompute_granularity", "TransformerConfig"),
    _function(_DISTRIBUTED, "DistributedDataParallel._make_forward_pre_hook", ""),
    # graphs of layers
    *_of("megatron.core.transformer.cuda_graphs", "is_graph_capturing _set_capture_start _set_capture_end"),
    # gradients
    *_of(
        "megatron.core.tensor_parallel.layers",
        "VocabParallelEmbedding dist_all_gather_func get_tensor_model_parallel_group_if_none",
    ),
    _function(_DISTRIBUTED, "finalize_model_grads", "model num_tokens"),
    _function(_DISTRIBUTED, "DistributedDataParallel._make_backward_post_hook", "param"),
    *_of(_DISTRIBUTED, "param_to_bucket_group ddp_config no_sync", "DistributedDataParallel"),
    *_of(_DISTRIBUTED, "overlap_grad_reduce", "DistributedDataParallelConfig"),
    # imports of the module of post-validation
    *_of(_OPTIMIZER, "ChainedOptimizer MegatronOptimizer clip_grads"),
    _function("megatron.core.optimizer.clip_grads", "clip_grad_by_total_norm_fp32", "parameters max_norm total_norm"),
    # state that a forward changes
    *_of("megatron.core.tensor_parallel", "get_cuda_rng_tracker"),
    *_of(_RANDOM, "_get_cuda_rng_state _set_cuda_rng_state get_all_rng_states"),
    *_of(_RANDOM, "get_states set_states", "CudaRNGStatesTracker"),
    *_of("megatron.core.transformer.moe.moe_utils", "get_moe_layer_wise_logging_tracker"),
)
"""Used by every schedule, on every version."""

POST_VALIDATION: tuple[Used, ...] = (
    *_of(
        "megatron.core.optimizer.optimizer",
        "_copy_main_params_to_model_params config count_zeros get_grad_norm get_grad_stats_parallel_group "
        "get_loss_scale get_parameters grad_scaler is_stub_optimizer optimizer prepare_grads step_with_ready_grads "
        "zero_grad",
        "Float16OptimizerWithFloat16Params",
    ),
    *_of(_OPTIMIZER, "chained_optimizers grads_states_parallel_group_is_shared", "ChainedOptimizer"),
    *_of(
        _OPTIMIZER,
        "barrier_with_L1_time clip_grad log_num_zeros_in_grad use_precision_aware_optimizer_no_fp8_or_ds_fp8",
        "OptimizerConfig",
    ),
    *_of("megatron.core.optimizer.grad_scaler", "load_state_dict state_dict update", "MegatronGradScaler"),
    *_of(_DISTRIBUTED, "start_param_sync zero_grad_buffer", "DistributedDataParallel"),
    *_of(_DISTRIBUTED, "overlap_param_gather use_distributed_optimizer", "DistributedDataParallelConfig"),
)
"""Used by schedules with post-validation of optimizer steps."""

VOCABULARY: tuple[Used, ...] = (
    *_of(
        "megatron.core.optimizer.optimizer", "float16_groups fp32_from_fp32_groups", "Float16OptimizerWithFloat16Params"
    ),
)
"""Used by schedules with vocabulary parallelism, in addition to names that others use, too."""

_MAPPING = "megatron.core.dist_checkpointing.mapping"
_BUFFERS = f"{_DISTRIBUTED}.param_and_grad_buffer"
SHARDED_UNITS: tuple[Used, ...] = (
    *_of(
        _DISTRIBUTED,
        "bucket_groups buffers expert_parallel_bucket_groups expert_parallel_buffers finish_grad_sync",
        "DistributedDataParallel",
    ),
    *_of(
        _BUFFERS,
        "buckets finish_grad_sync intra_distributed_optimizer_instance_rank intra_distributed_optimizer_instance_size",
        "_ParamAndGradBucketGroup",
    ),
    _function(_BUFFERS, "_ParamAndGradBucketGroup.start_param_sync", "force_sync"),
    *_of(_BUFFERS, "grad_data param_data reset", "_ParamAndGradBuffer"),
    *_of(_BUFFERS, "grad_data param_data", "_ParamAndGradBucket"),
    *_of(
        f"{_OPTIMIZER}.distrib_optimizer",
        "buffers is_stub_optimizer model_float16_groups model_fp32_groups model_param_gbuf_map shard_float16_groups "
        "shard_fp32_from_float16_groups shard_fp32_groups",
        "DistributedOptimizer",
    ),
    *(
        _function(f"{_OPTIMIZER}.distrib_optimizer", f"DistributedOptimizer.{name}", parameters)
        for name, parameters in (
            ("_get_model_param_range_map", "param"),
            ("_copy_model_grads_to_main_grads", ""),
            ("_copy_main_params_to_model_params", ""),
        )
    ),
    *_of("megatron.core.dist_checkpointing.dict_utils", "dict_list_map_inplace"),
    *_of(_MAPPING, "ShardedTensorFactory is_main_replica"),
    *_of(_MAPPING, "data replica_id", "ShardedTensor"),
)
"""Used by sharded units."""
SHARDED_UNITS_SINCE_0_18: tuple[Used, ...] = (
    *SHARDED_UNITS,
    _function(f"{_OPTIMIZER}.distrib_optimizer", "DistributedOptimizer.start_param_sync_for_bucket_group_subset", ""),
)

ON_DEMAND: tuple[Used, ...] = (
    *_of(_PARALLEL_STATE, "get_expert_data_parallel_group"),
    *_of(
        _DISTRIBUTED,
        "average_in_collective check_for_large_grads check_for_nan_in_grad",
        "DistributedDataParallelConfig",
    ),
    _function(_BUFFERS, "_ParamAndGradBucketGroup.check_grads", "check_for_nan_or_inf check_for_large"),
    *_of(_BUFFERS, "gradient_scaling_factor", "_ParamAndGradBucket"),
)
"""Used by sharded units whose shards are exchanged on demand."""

LAYER_PLANS: tuple[Used, ...] = (
    *_of("megatron.core.pipeline_parallel.utils", "set_streams"),
    _function(
        "megatron.core.pipeline_parallel.combined_1f1b",
        "combined_forward_backward_step",
        "forward_step_func data_iterator f_model num_microbatches input_tensor forward_data_store b_model "
        "b_input_tensor b_output_tensor b_output_tensor_grad config f_model_chunk_id post_forward "
        "post_backward collect_non_loss_data is_first_microbatch current_microbatch",
    ),
    *_of(
        "megatron.core.models.common.model_chunk_schedule_plan",
        "num_layers get_layer",
        "TransformerModelChunkSchedulePlan",
    ),
    *_of("megatron.core.transformer", "overlap_moe_expert_parallel_comm", "TransformerConfig"),
)
"""Used to hide the all-to-all of experts; since 0.14."""

LATE_LINES = _of("megatron.core.num_microbatches_calculator", "_GLOBAL_NUM_MICROBATCHES_CALCULATOR")
"""Used in a Megatron-LM job with post-validation, to log an iteration after the next one has begun."""

DATA = (_function("megatron.core.datasets.utils", "get_blend_from_list", "blend"),)
"""Used in a Megatron-LM job to check its data files before it starts."""

BUBBLE = _of("megatron.training.global_vars", "get_tensorboard_writer")
"""Used by ``--zero-bubble-log-bubble`` in a Megatron-LM job."""

_GROUPS = "megatron.core.process_groups_config"
GROUPS_OF_0_13 = _of(_GROUPS, "use_mpu_process_groups pp tp", "ModelCommProcessGroups")
GROUPS_OF_0_14 = (*GROUPS_OF_0_13, *_of(_GROUPS, "GradFinalizeProcessGroups"))
GROUPS = _of(_GROUPS, "use_mpu_process_groups pp tp cp embd pos_embd dp_cp", "ProcessGroupCollection")
"""Collections of process groups; since 0.15, there is one class for all purposes."""
