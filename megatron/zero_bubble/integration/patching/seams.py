"""Upstream names that are replaced or used, per minor version of megatron-core and its Megatron-LM release.

:data:`_SEAMS` has what most versions share; :data:`MINORS` maps every supported version to its seams.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import megatron.core

from megatron.zero_bubble.core.errors import SeamError
from megatron.zero_bubble.integration.patching import used
from megatron.zero_bubble.integration.patching.loop_seams import LOOP, READERS, TRAINING, LoopSeams, ReaderSeams
from megatron.zero_bubble.integration.patching.seam import Seam, Used
from megatron.zero_bubble.integration.patching.used import SHARDED_UNITS, SHARDED_UNITS_SINCE_0_18


@dataclass(frozen=True)
class Seams:
    """The seams of one minor version.

    Attributes:
        schedule, schedule_of_chunks: the functions that ``get_forward_backward_func`` looks up and returns.
        last_stage, tied_gradients: replaced for placements other than Megatron's.
        linear: the function through which every linear defers its weight gradient to W.
        gradients: returns gradients that are asked for by name.
        reduced: the reduction over tensor-parallel ranks that the backwards of megatron-core's mappings call.
        layer_graphs: records a layer as CUDA graphs, and repeats them.
        zeroed_gradients: replaced only with post-validation.
        counted_zeros: replaced only with vocabulary parallelism.
        forward_step, backward_step: replaced only to observe the stock schedule.
        all_to_alls: replaced only to record the all-to-alls of experts.
        graphed: captures layers as CUDA graphs; replaced if TransformerEngine is installed.
        balanced: the loss that balances the load of experts; replaced only with slices, and not in 0.13.
        flags, validated_flags: add and validate the flags of a Megatron-LM job.
        process_groups: creates the process groups of a Megatron-LM job.
        models: take a function that builds one chunk; replaced in Megatron-LM jobs with placements other than
            Megatron's.
        data: builds the data iterators of one chunk; replaced like ``models``.
        pipeline_group: like ``models``, for versions whose chunks look up the pipeline group regardless of the process
            groups passed to them.
        used: names that are looked up but not replaced.
        loop: replaced in Megatron-LM jobs with post-validation.
        readers: replaced in Megatron-LM jobs with sharded units.
        sharded_units: looked up, but not replaced here, with sharded units.
        loads_both_ends: whether a checkpoint can be loaded if one rank holds both ends of a tied embedding.
    """

    schedule: Seam
    schedule_of_chunks: Seam
    last_stage: Seam
    tied_gradients: Seam
    linear: Seam
    gradients: Seam
    reduced: Seam
    layer_graphs: Seam
    zeroed_gradients: Seam
    counted_zeros: tuple[Seam, ...]
    forward_step: Seam
    backward_step: Seam
    all_to_alls: tuple[Seam, ...]
    graphed: Seam
    balanced: tuple[Seam, ...]
    flags: Seam
    validated_flags: Seam
    process_groups: Seam
    models: tuple[Seam, ...]
    data: Seam
    used: tuple[Used, ...]
    loop: LoopSeams
    readers: ReaderSeams
    sharded_units: tuple[Used, ...] = SHARDED_UNITS
    pipeline_group: Seam | None = None
    loads_both_ends: bool = True


_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
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
)

_SEAMS = Seams(
    schedule=Seam(
        _SCHEDULES,
        "forward_backward_pipelining_without_interleaving",
        _FORWARD_BACKWARD,
        "runs the zero-bubble plan in place of 1F1B; get_forward_backward_func looks it up at each call",
    ),
    schedule_of_chunks=Seam(
        _SCHEDULES,
        "forward_backward_pipelining_with_interleaving",
        _FORWARD_BACKWARD,
        "runs the zero-bubble plan where a rank has several model chunks",
    ),
    last_stage=Seam(
        "megatron.core.parallel_state",
        "is_pipeline_last_stage",
        ("ignore_virtual", "vp_stage"),
        "finds the last stage, and so the loss, on the rank where the placement has it",
    ),
    tied_gradients=Seam(
        "megatron.core.distributed.finalize_model_grads",
        "_allreduce_word_embedding_grads",
        ("model", "config"),
        "adds the gradients of a tied embedding if both of its ends are on one rank",
    ),
    linear=Seam(
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
        "defers the weight gradient to W in a split backward",
    ),
    gradients=Seam(
        "torch.autograd",
        "grad",
        ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused"),
        "returns the gradient of a weight also if it waits for W",
    ),
    reduced=Seam(
        "megatron.core.tensor_parallel.mappings",
        "_reduce",
        ("input_", "group"),
        "copies what W needs of a gradient before it is reduced in place",
    ),
    layer_graphs=Seam(
        "megatron.core.transformer.cuda_graphs",
        "CudaGraphManager.__call__",
        ("self", "megatron_module", "args", "kwargs"),
        "runs layers without CUDA graphs of their own, because the layers of a stage are recorded together",
    ),
    zeroed_gradients=Seam(
        "megatron.core.distributed.distributed_data_parallel",
        "DistributedDataParallel.zero_grad_buffer",
        ("self",),
        "keeps the gradients until the optimizer step that used them is validated",
    ),
    counted_zeros=tuple(
        Seam(
            "megatron.core.optimizer.optimizer",
            f"{optimizer}.count_zeros",
            ("self",),
            "does not count the zeros in the gradients of padding, which only a divided vocabulary has",
        )
        for optimizer in ("MegatronOptimizer", "ChainedOptimizer")
    ),
    forward_step=Seam(
        _SCHEDULES,
        "forward_step",
        ("forward_step_func", "data_iterator", "model", "num_microbatches", "input_tensor", "forward_data_store"),
        "times the forwards of the stock schedule",
    ),
    backward_step=Seam(
        _SCHEDULES,
        "backward_step",
        ("input_tensor", "output_tensor", "output_tensor_grad", "config"),
        "times the backwards of the stock schedule",
    ),
    all_to_alls=tuple(
        Seam(
            "megatron.core.transformer.moe.token_dispatcher",
            f"MoE{kind}TokenDispatcher.{method}",
            ("self",),
            "times the all-to-alls of experts in recorded iterations",
        )
        for kind in ("AlltoAll", "AllGather", "Flex")
        for method in ("token_dispatch", "token_combine")
    ),
    graphed=Seam(
        "megatron.core.transformer.cuda_graphs",
        "make_graphed_callables",
        ("modules", "sample_args", "sample_kwargs", "_order"),
        "captures CUDA graphs of layers by slots, in place of the order of 1F1B",
    ),
    balanced=(
        Seam(
            "megatron.core.transformer.moe.router",
            "switch_load_balancing_loss_func",
            ("probs", "tokens_per_expert", "total_num_tokens", "topk", "num_experts", "moe_aux_loss_coeff"),
            "balances the load of experts over whole sequences, whose slices are routed one by one",
        ),
    ),
    flags=Seam(
        "megatron.training.arguments",
        "add_megatron_arguments",
        ("parser",),
        "adds our flags to Megatron's flags and --help",
    ),
    validated_flags=Seam(
        "megatron.training.initialize",
        "validate_args",
        ("args", "defaults"),
        "checks our flags against the job's, and enables the schedule before the job starts",
    ),
    process_groups=Seam(
        "megatron.core.parallel_state",
        "initialize_model_parallel",
        ("virtual_pipeline_model_parallel_size", "get_embedding_ranks"),
        "lets every rank detect that another rank is lost or cannot write a recording; groups the ranks where the "
        "placement has the first and the last stage, which may share an embedding",
    ),
    models=(
        Seam(
            "megatron.training.training",
            "get_model",
            ("model_provider_func", "model_type"),
            "builds each model chunk on the rank where the placement has it",
        ),
    ),
    data=Seam(
        TRAINING,
        "build_train_valid_test_data_iterators",
        ("build_train_valid_test_datasets_provider",),
        "gives data to the model chunks that read them, on the rank where the placement has them",
    ),
    used=(*used.USED, *used.GROUPS),
    loop=LOOP,
    readers=READERS,
)

# Since 0.18, models can also be built from a configuration, and the module that parses flags validates them.
_BUILDER = Seam(
    "megatron.training.models.dist_utils",
    "build_virtual_pipeline_stages",
    ("build_model_func", "pg_collection", "vp_size"),
    "builds each model chunk of a model from a configuration on the rank where the placement has it",
)
_ASKS_FOR_GROUPS = replace(
    _SEAMS,
    pipeline_group=Seam(
        "megatron.core.parallel_state",
        "get_pipeline_model_parallel_group",
        ("check_initialized",),
        "gives a model chunk, while it is built, the pipeline rank where Megatron expects it",
    ),
)
_SINCE_0_18 = replace(
    _SEAMS,
    validated_flags=replace(_SEAMS.validated_flags, module="megatron.training.arguments"),
    models=(*_SEAMS.models, _BUILDER),
    sharded_units=SHARDED_UNITS_SINCE_0_18,
)

# Until 0.14, a checkpoint cannot be loaded if parts of a weight overlap on one rank.
_UNTIL_0_14 = replace(_SEAMS, loads_both_ends=False)
# Dispatchers of 0.13 have other methods, so their all-to-alls count as part of what passes compute; its loss that
# balances the load of experts has other arguments.
# Its training loop captures graphs itself.
_OF_0_13 = replace(
    _UNTIL_0_14,
    used=(*used.USED, *used.GROUPS_OF_0_13),
    all_to_alls=(),
    balanced=(),
    graphed=replace(_SEAMS.graphed, module="transformer_engine.pytorch"),
)
_OF_0_14 = replace(_UNTIL_0_14, used=(*used.USED, *used.GROUPS_OF_0_14))

MINORS: dict[str, Seams] = {
    "0.13": _OF_0_13,
    "0.14": _OF_0_14,
    "0.15": _ASKS_FOR_GROUPS,
    "0.16": _SEAMS,
    "0.17": _SEAMS,
    "0.18": _SINCE_0_18,
    "0.19": _SINCE_0_18,
    "0.20": _SINCE_0_18,
}


def installed_seams() -> Seams:
    """The seams of the megatron-core that this process imports.

    Raises:
        SeamError: the minor version is not in the table.
    """
    version = megatron.core.__version__
    minor = ".".join(version.split(".")[:2])
    if minor not in MINORS:
        raise SeamError(
            f"zero-bubble training supports megatron-core {', '.join(MINORS)}; this is {version}; "
            "install a supported version"
        )
    return MINORS[minor]
