"""The seams of megatron-core 0.16."""

from megatron.zero_bubble.patching.seam import Seam

_FORWARD_BACKWARD = (
    "forward_step_func",
    "data_iterator",
    "model",
    "num_microbatches",
    "seq_length",
    "micro_batch_size",
    "decoder_seq_length",
    "forward_only",
    "collect_non_loss_data",
    "first_val_step",
    "adjust_tensor_shapes_fn",
    "p2p_communicator",
    "pg_collection",
    "force_all_reduce",
)

SCHEDULE = Seam(
    "megatron.core.pipeline_parallel.schedules",
    "forward_backward_pipelining_without_interleaving",
    _FORWARD_BACKWARD,
    "runs the zero-bubble plan in place of 1F1B; get_forward_backward_func looks it up at each call",
)

SCHEDULE_OF_CHUNKS = Seam(
    "megatron.core.pipeline_parallel.schedules",
    "forward_backward_pipelining_with_interleaving",
    _FORWARD_BACKWARD,
    "runs the zero-bubble plan where a rank has several model chunks",
)

LAST_STAGE = Seam(
    "megatron.core.parallel_state",
    "is_pipeline_last_stage",
    ("ignore_virtual", "vp_stage"),
    "finds the loss on the rank where the placement has the last stage",
)

TIED_GRADIENTS = Seam(
    "megatron.core.distributed.finalize_model_grads",
    "_allreduce_word_embedding_grads",
    ("model", "config"),
    "adds the gradients of a tied embedding whose both ends are on one rank",
)

LINEAR = Seam(
    "megatron.core.tensor_parallel.layers",
    "linear_with_grad_accumulation_and_async_allreduce",
    (
        "input",
        "weight",
        "bias",
        "gradient_accumulation_fusion",
        "allreduce_dgrad",
        "sequence_parallel",
        "grad_output_buffer",
        "wgrad_deferral_limit",
        "tp_group",
    ),
    "leaves the weight gradient to W where a split backward runs",
)

FORWARD_STEP = Seam(
    "megatron.core.pipeline_parallel.schedules",
    "forward_step",
    ("forward_step_func", "data_iterator", "model", "num_microbatches", "input_tensor", "forward_data_store"),
    "times the forwards of the stock schedule",
)

BACKWARD_STEP = Seam(
    "megatron.core.pipeline_parallel.schedules",
    "backward_step",
    ("input_tensor", "output_tensor", "output_tensor_grad", "model_type", "config"),
    "times the backwards of the stock schedule",
)
