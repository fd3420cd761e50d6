"""The options of Megatron that zero-bubble schedules do not support, as a table.

An option that a later Megatron adds counts as disabled where it is missing.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from megatron.zero_bubble.errors import UserError


class _Option(NamedTuple):
    """A Megatron option that zero-bubble schedules do not support.

    Attributes:
        allowed: the only supported value; None is supported too.
        remedy: the remedy for another value; default: drop the flag.
        spelled: the flag; default: that with the option's name.
        anywhere: whether the rule applies to every placement; False limits it to placements other than Megatron's.
        post_validation: whether the rule applies only with post-validation.
        slices: whether the rule applies only with sequence slices.
        vocabulary: whether the rule applies only with vocabulary parallelism.
    """

    name: str
    allowed: Any
    why: str
    remedy: str = ""
    spelled: str = ""
    anywhere: bool = True
    post_validation: bool = False
    slices: bool = False
    vocabulary: bool = False

    @property
    def flag(self) -> str:
        """The flag of Megatron-LM that sets the option."""
        return self.spelled or f"--{self.name.replace('_', '-')}"

    @property
    def subject(self) -> str:
        """What needs the option to have its allowed value."""
        if self.vocabulary:
            return "schedules with vocabulary parallelism"
        if self.slices:
            return "schedules with sequence slices"
        if self.post_validation:
            return "schedules with post-validation"
        return "zero-bubble schedules" if self.anywhere else "schedules with stages on a V"


_GRAPHS = "Megatron captures CUDA graphs in the order of its own 1F1B"
_FSDP = "FSDP does not reduce gradients through DistributedDataParallel"
_MAXIMUM = "forwards that run again would count twice in the maximum of the attention logits"
_OPTIONS = (
    _Option("enable_cuda_graph", False, _GRAPHS),  # before 0.15, graphs have separate flags
    _Option("external_cuda_graph", False, _GRAPHS),
    _Option("cuda_graph_impl", "none", _GRAPHS, "set --cuda-graph-impl none"),
    _Option("overlap_moe_expert_parallel_comm", False, "this option itself orders B and W inside each layer"),
    _Option("delay_wgrad_compute", False, "the schedule already defers weight gradients"),
    _Option("overlap_dispatch_backward_with_experts_wgrad", False, "this option runs the W of experts inside their B"),
    _Option(
        "use_transformer_engine_op_fuser",
        False,
        "fused operations compute weight gradients that the schedule must defer to W",
    ),
    _Option("fine_grained_activation_offloading", False, "offloading assumes Megatron's order of chunks"),
    _Option(
        "cpu_offloading",
        False,
        "offloading assumes Megatron's order of backward passes",
        "drop --cpu-offloading-num-layers",
    ),
    _Option("cpu_offloading_num_layers", 0, "offloading assumes Megatron's order of backward passes"),
    _Option("moe_paged_stash", False, "Megatron resets the pages only in its own schedules"),
    _Option(
        "overlap_p2p_comm_warmup_flush",
        False,
        "the schedule decides which passes overlap with messages",
        spelled="--overlap-p2p-communication-warmup-flush",
    ),
    _Option("variable_seq_lengths", False, "receives are posted before the shape is known", "pad to --seq-length"),
    _Option("use_ring_exchange_p2p", False, "zero-bubble schedules post their own sends and receives"),
    _Option("use_legacy_models", False, "legacy models bypass the linears whose weight gradients are deferred"),
    _Option("use_custom_fsdp", False, _FSDP),
    _Option("use_megatron_fsdp", False, _FSDP),
    _Option("use_torch_fsdp2", False, _FSDP),
    _Option("overlap_param_gather_with_optimizer_step", False, "this overlap assumes Megatron's order of chunks"),
    _Option("mtp_num_layers", None, "Megatron puts multi-token prediction on the last rank", anywhere=False),
    _Option("init_model_with_meta_device", False, "a tied embedding is copied when the model is built", anywhere=False),
    _Option("logits_save_dir", None, "Megatron looks for the output layer on the last rank", anywhere=False),
    _Option("logits_load_dir", None, "Megatron looks for the output layer on the last rank", anywhere=False),
    _Option("qk_clip", False, _MAXIMUM, post_validation=True),
    _Option("log_max_attention_logit", False, _MAXIMUM, post_validation=True),
    _Option(
        "reuse_grad_buf_for_mxfp8_param_ag",
        False,
        "weights are gathered into the memory of the gradients, which the validation may need",
        post_validation=True,
    ),
    _Option(
        "optimizer_cpu_offload",
        False,
        "the optimizer on the host keeps copies that a rollback does not restore",
        post_validation=True,
    ),
    _Option("optimizer_cuda_graph", False, "a captured step cannot be repeated or delayed", post_validation=True),
    _Option("perform_rl_step", False, "rollouts would use weights that may be undone", post_validation=True),
    _Option("vision_pretraining", False, "the teacher follows weights that may be undone", post_validation=True),
    _Option("moe_routing_trace_path", None, "forwards that run again would be traced twice", post_validation=True),
    _Option("context_parallel_size", 1, "context parallelism distributes every sequence over its ranks", slices=True),
    _Option("mtp_num_layers", None, "multi-token prediction reads tokens of the next slice", slices=True),
    _Option("multi_latent_attention", False, "its rotary embeddings begin at the first token", slices=True),
    _Option("experimental_attention_variant", None, "its layers do not keep keys and values", slices=True),
    _Option("sft", False, "its samples are packed, and a slice attends to the whole sequence before it", slices=True),
    _Option("tp_comm_overlap", False, "its buffers have the size of whole sequences", slices=True),
    _Option("context_parallel_size", 1, "every rank has rows for whole sequences", vocabulary=True),
    _Option("mtp_num_layers", None, "multi-token prediction has an output layer of its own", vocabulary=True),
    _Option("label_smoothing_factor", 0.0, "it needs the logits of all tokens in the loss", vocabulary=True),
    _Option("logits_save_dir", None, "no rank has whole logits", vocabulary=True),
    _Option("logits_load_dir", None, "no rank has whole logits", vocabulary=True),
    _Option("defer_embedding_wgrad_compute", False, "T already defers the weight gradient", vocabulary=True),
    _Option("use_mup", False, "its scaled logits are not supported", vocabulary=True),
    _Option("init_model_with_meta_device", False, "initial weights are cut into shards", vocabulary=True),
)


_BESIDE_THE_TABLE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--fp8-format", {"dest": "fp8"}),
    ("--fp8-recipe", {"default": "delayed"}),
    (
        "--microbatch-group-size-per-virtual-pipeline-stage",
        {"dest": "microbatch_group_size_per_vp_stage", "type": int},
    ),
)
"""Flags of the other rules of ``check_options``, as arguments of ``add_argument``."""
_COUNTS = ("mtp_num_layers",)
"""Options whose only supported value, None, does not show that they are numbers."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags that ``check_options`` reads, as Megatron-LM spells them, except those that the parser has."""
    flags = {option.flag: _arguments(option) for option in reversed(_OPTIONS)} | dict(_BESIDE_THE_TABLE)
    for flag, arguments in flags.items():
        if flag not in parser._option_string_actions:
            parser.add_argument(flag, **arguments)


def _arguments(option: _Option) -> dict[str, Any]:
    """Return the arguments of ``add_argument`` for an option, which by default has its allowed value."""
    if isinstance(option.allowed, bool):
        return {"dest": option.name, "action": "store_true"}
    kind = int if option.name in _COUNTS else str if option.allowed is None else type(option.allowed)
    return {"dest": option.name, "type": kind, "default": option.allowed}


def check_options(
    values: Any, in_place: bool = True, post_validation: bool = False, num_slices: int = 1, vocabulary: bool = False
) -> None:
    """Reject Megatron options that zero-bubble schedules do not support.

    Args:
        values: a ``TransformerConfig``, or the flags of a Megatron-LM job; missing options count as disabled.
        in_place: whether every stage is on the rank where Megatron itself would put it.
        post_validation: whether optimizer steps are validated in the next iteration.
        num_slices: number of slices of a sequence.
        vocabulary: whether the vocabulary is divided over all pipeline ranks.

    Raises:
        UserError: the rule, the value and the remedy.
    """
    for option in _OPTIONS:
        value = getattr(values, option.name, option.allowed)
        applies = (
            (option.anywhere or not in_place)
            and (post_validation or not option.post_validation)
            and (num_slices > 1 or not option.slices)
            and (vocabulary or not option.vocabulary)
        )
        if applies and value not in (option.allowed, None):
            raise UserError(
                f"{option.subject} need {option.name}={option.allowed!r}, because {option.why}; got {value!r}; "
                + (option.remedy or f"drop {option.flag}")
            )
    recipe = getattr(values, "fp8_recipe", None)
    if post_validation and getattr(values, "fp8", None) and getattr(recipe, "value", recipe) == "delayed":
        raise UserError(
            "post-validation does not support FP8 with delayed scaling, because forwards that run again would count "
            f"twice in the history of maxima; got --fp8-format {values.fp8} --fp8-recipe delayed; give --fp8-recipe "
            "tensorwise, or drop --zero-bubble-post-validation"
        )
    balancing = getattr(values, "moe_router_load_balancing_type", None)
    if num_slices > 1 and "seq_aux_loss" in (balancing if isinstance(balancing, (list, tuple)) else (balancing,)):
        raise UserError(
            "schedules with sequence slices do not support an auxiliary loss per sequence, because no pass sees a "
            f"whole sequence; got --moe-router-load-balancing-type seq_aux_loss and {num_slices} slices; give aux_loss"
        )
    group = getattr(values, "microbatch_group_size_per_vp_stage", None)
    # Megatron ignores the group size without virtual stages; its default is the number of pipeline ranks.
    grouped = getattr(values, "virtual_pipeline_model_parallel_size", None) is not None
    if grouped and group not in (None, values.pipeline_model_parallel_size):
        raise UserError(
            "zero-bubble schedules support only a microbatch group size equal to the number of pipeline ranks, got "
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} and {values.pipeline_model_parallel_size} "
            "ranks; drop the flag"
        )
