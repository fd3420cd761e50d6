"""What options of Megatron must be under our choices, as a table of rules.

An option that a later Megatron adds counts as disabled where it is missing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megatron.zero_bubble.core.errors import Remedy, UserError, as_flag
from megatron.zero_bubble.planning.exclusions import (
    BALANCE,
    POST_VALIDATION,
    SHARDS,
    SLICES,
    VOCABULARY,
    refuse_excluded,
)
from megatron.zero_bubble.planning.job.overlaps import OVERLAPS
from megatron.zero_bubble.planning.rule import Choice, OptionRule
from megatron.zero_bubble.planning.run_options import RunOptions

SCHEDULE = Choice("a zero-bubble schedule", lambda run: [("schedule", run.setup.name)], "zero-bubble schedules")
"""What is always chosen where options are checked."""
ON_A_V = Choice("stages on a V or in a wave", SCHEDULE.shown_by)
GRAPHS = Choice(SCHEDULE.words, SCHEDULE.shown_by, SCHEDULE.plural)
"""A schedule, in a job whose training may capture CUDA graphs."""
IN_SEQUENCE = Choice(
    "a schedule that does not hide the all-to-all of experts",
    lambda run: [] if run.setup.overlaps else SCHEDULE.shown_by(run),
    "zero-bubble schedules that do not hide the all-to-all of experts",
)
_GRAPHS = "Megatron captures CUDA graphs in the order of its own 1F1B"
_FSDP = "FSDP does not reduce gradients through DistributedDataParallel"
_MAXIMUM = "forwards that run again would count twice in the maximum of the attention logits"
_OFFLOAD = "offloading assumes Megatron's order of backward passes"
_WIDER = "its stages send more than one hidden state per token, and not all of them equally many"
_SHARED_MEMORY = "weights are gathered into the memory of the gradients, which the validation may need"
_COPIES = "TransformerEngine keeps whole copies of the weights in this precision"
_PER_TOKEN = "a mean over microbatches would weight tokens by the microbatches of their replica"
_DROP_GRAPHS = "set --cuda-graph-impl none, or, with --perform-rl-step, drop --rl-training-cuda-graphs"
_DROP_LAYERS = "drop --cpu-offloading-num-layers"
_SCAN = "a slice would need the state of the scan after the slice before it"
_OTHER_MODEL = "it divides the vocabulary layers of GPTModel"
_NO_VOCABULARY = "give --zero-bubble-vocabulary-parallel off"
_HYBRID = (("hybrid_layer_pattern", None), ("hybrid_override_pattern", None), ("is_hybrid_model", False))
"""What a hybrid model has: a pattern of layers, by the older flag until core_r0.16, or none, where all have a scan."""
_EXPERTS = "experts are sharded over other groups, which this version does not support"


def _done_by_itself(option: str, why: str) -> OptionRule:
    """A row for an option that is switched off, because the schedule does in its place what it asks for."""
    return OptionRule(SCHEDULE, option, False, why, is_set=True)


OPTIONS = (
    OptionRule(GRAPHS, "enable_cuda_graph", False, _GRAPHS),  # before 0.15, graphs have separate flags
    OptionRule(GRAPHS, "external_cuda_graph", False, _GRAPHS),
    OptionRule(GRAPHS, "cuda_graph_impl", "none", _GRAPHS, _DROP_GRAPHS),
    OptionRule(
        IN_SEQUENCE,
        "overlap_moe_expert_parallel_comm",
        False,
        "the passes of two microbatches overlap only in a schedule with pairs",
        "give --zero-bubble-overlap-experts, with a schedule such as interleaved-1f1b, or drop the option",
    ),
    _done_by_itself("delay_wgrad_compute", "the schedule delays all weight gradients itself, to W"),
    _done_by_itself(
        "overlap_dispatch_backward_with_experts_wgrad", "the schedule decides where the weight gradients of experts run"
    ),
    _done_by_itself("overlap_p2p_comm_warmup_flush", "the schedule overlaps messages with passes in all of its phases"),
    OptionRule(SCHEDULE, "cpu_offloading", False, _OFFLOAD, _DROP_LAYERS),
    OptionRule(SCHEDULE, "cpu_offloading_num_layers", 0, _OFFLOAD),
    OptionRule(SCHEDULE, "moe_ncclep_zero_copy", False, "all layers of experts share the buffers that W would read"),
    OptionRule(SCHEDULE, "use_ring_exchange_p2p", False, "zero-bubble schedules post their own sends and receives"),
    *(OptionRule(SCHEDULE, f"enable_{name}", False, _WIDER) for name in ("hyper_connections", "mhc_connections")),
    OptionRule(SCHEDULE, "enable_attention_residuals", False, _WIDER),
    OptionRule(SCHEDULE, "use_legacy_models", False, "legacy models bypass the linears that defer W"),
    OptionRule(SCHEDULE, "use_custom_fsdp", False, _FSDP),
    OptionRule(SCHEDULE, "use_megatron_fsdp", False, _FSDP),
    OptionRule(SCHEDULE, "use_torch_fsdp2", False, _FSDP),
    OptionRule(ON_A_V, "init_model_with_meta_device", False, "a tied embedding is copied when the model is built"),
    OptionRule(ON_A_V, "logits_save_dir", None, "Megatron looks for the output layer on the last rank"),
    OptionRule(ON_A_V, "logits_load_dir", None, "Megatron looks for the output layer on the last rank"),
    OptionRule(POST_VALIDATION, "qk_clip", False, _MAXIMUM),
    OptionRule(POST_VALIDATION, "log_max_attention_logit", False, _MAXIMUM),
    OptionRule(POST_VALIDATION, "reuse_grad_buf_for_mxfp8_param_ag", False, _SHARED_MEMORY),
    OptionRule(
        POST_VALIDATION, "overlap_param_gather_with_optimizer_step", False, "it gathers weights that may be undone"
    ),
    OptionRule(POST_VALIDATION, "optimizer_cpu_offload", False, "a rollback does not restore its copies on the host"),
    OptionRule(POST_VALIDATION, "optimizer_cuda_graph", False, "a captured step cannot be repeated or delayed"),
    OptionRule(POST_VALIDATION, "perform_rl_step", False, "rollouts would use weights that may be undone"),
    OptionRule(POST_VALIDATION, "vision_pretraining", False, "the teacher follows weights that may be undone"),
    OptionRule(POST_VALIDATION, "mtp_detach_heads", False, "gradients are clipped by one norm, and these by another"),
    OptionRule(
        POST_VALIDATION, "fine_grained_activation_offloading", False, "forwards that run again would be offloaded twice"
    ),
    OptionRule(POST_VALIDATION, "moe_paged_stash", False, "forwards that run again are not in the order of its pages"),
    OptionRule(
        POST_VALIDATION, "moe_expert_rank_capacity_factor", None, "Megatron repeats an iteration whose experts overflow"
    ),
    OptionRule(POST_VALIDATION, "moe_routing_trace_path", None, "forwards that run again would be traced twice"),
    OptionRule(
        SLICES, "fine_grained_activation_offloading", False, "the backwards of slices run from the last to the first"
    ),
    OptionRule(SLICES, "context_parallel_size", 1, "it distributes every sequence over its ranks"),
    OptionRule(SLICES, "mtp_num_layers", None, "multi-token prediction reads tokens of the next slice"),
    OptionRule(SLICES, "multi_latent_attention", False, "its rotary embeddings begin at the first token"),
    OptionRule(SLICES, "experimental_attention_variant", None, "its layers do not keep keys and values"),
    OptionRule(SLICES, "sft", False, "samples are packed, and slices attend to all before them"),
    OptionRule(SLICES, "tp_comm_overlap", False, "its buffers have the size of whole sequences"),
    *(OptionRule(SLICES, name, value, _SCAN, "train without slices") for name, value in _HYBRID),
    *(OptionRule(VOCABULARY, name, value, _OTHER_MODEL, _NO_VOCABULARY) for name, value in _HYBRID),
    OptionRule(VOCABULARY, "context_parallel_size", 1, "every rank has rows for whole sequences"),
    OptionRule(VOCABULARY, "mtp_num_layers", None, "multi-token prediction has an output layer of its own"),
    OptionRule(VOCABULARY, "label_smoothing_factor", 0.0, "it needs the logits of all tokens in the loss"),
    OptionRule(VOCABULARY, "logits_save_dir", None, "no rank has whole logits"),
    OptionRule(VOCABULARY, "logits_load_dir", None, "no rank has whole logits"),
    OptionRule(VOCABULARY, "defer_embedding_wgrad_compute", False, "T already defers the weight gradient"),
    OptionRule(VOCABULARY, "use_mup", False, "its scaled logits are not supported"),
    OptionRule(VOCABULARY, "init_model_with_meta_device", False, "initial weights are cut into shards"),
    OptionRule(
        SHARDS,
        "use_distributed_optimizer",
        True,
        "each replica steps its own shard",
        "give --use-distributed-optimizer",
    ),
    OptionRule(SHARDS, "optimizer", "adam", "the state of no other is divided", "give --optimizer adam"),
    OptionRule(SHARDS, "use_precision_aware_optimizer", False, "shards are stepped with gradients in float32"),
    OptionRule(SHARDS, "overlap_grad_reduce", False, "the schedule itself reduces gradients, during the passes"),
    OptionRule(SHARDS, "overlap_param_gather", False, "the schedule itself gathers weights, during the passes"),
    OptionRule(SHARDS, "save_wgrads_interval", None, "every replica has only its shard of the gradients"),
    OptionRule(SHARDS, "num_experts", None, _EXPERTS),
    OptionRule(SHARDS, "num_moe_experts", None, _EXPERTS, "drop --num-experts"),
    OptionRule(SHARDS, "num_distributed_optimizer_instances", 1, "this version shards over all replicas"),
    OptionRule(SHARDS, "context_parallel_size", 1, "replicas must have whole sequences in this version"),
    OptionRule(SHARDS, "fp8", None, _COPIES, "drop --fp8-format"),
    OptionRule(SHARDS, "fp4", None, _COPIES, "drop --fp4-format"),
    OptionRule(SHARDS, "nccl_ub", False, "buffers that are registered with NCCL cannot be freed", "drop --use-nccl-ub"),
    OptionRule(SHARDS, "optimizer_cpu_offload", False, "the optimizer steps shards where they are"),
    OptionRule(SHARDS, "defer_embedding_wgrad_compute", False, "what it adds after the passes would not be reduced"),
    OptionRule(SHARDS, "mtp_num_layers", None, "this version does not support multi-token prediction"),
    OptionRule(BALANCE, "calculate_per_token_loss", True, _PER_TOKEN, "give --calculate-per-token-loss"),
    OptionRule(
        BALANCE,
        "num_moe_experts",
        None,
        "experts exchange tokens between replicas in every microbatch",
        "drop --num-experts",
    ),
    OptionRule(
        BALANCE, "mtp_num_layers", None, "the loss of multi-token prediction is a mean over microbatches", "drop it"
    ),
    OptionRule(BALANCE, "context_parallel_size", 1, "samples are not divided over ranks"),
    OptionRule(BALANCE, "fp8", None, "FP8 needs samples of a multiple of 16 tokens", "drop --fp8-format"),
    OptionRule(BALANCE, "reset_attention_mask", False, "every sample is one document already"),
)
"""For each choice, the only values that it supports; None is always supported."""
_SPELLED = {
    "overlap_p2p_comm_warmup_flush": "overlap_p2p_communication_warmup_flush",
    "fp8": "fp8_format",
    "fp4": "fp4_format",
    "nccl_ub": "use_nccl_ub",
    "num_moe_experts": "num_experts",
}
_BESIDE_THE_TABLE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--fp8-recipe", {"default": "delayed"}),
    ("--moe-shared-expert-overlap", {"action": "store_true"}),
    *(
        (f"--{no}-{option.replace('_', '-')}", {"dest": option, "action": "store_false"})
        for option in OVERLAPS.values()
        for no in ("no", "disable")
    ),
    ("--rl-training-cuda-graphs", {"action": "store_true"}),
    ("--use-transformer-engine-op-fuser", {"action": "store_true"}),
    ("--use-grouped-gemm-for-dense-mlp", {"action": "store_true"}),
    (
        "--microbatch-group-size-per-virtual-pipeline-stage",
        {"dest": "microbatch_group_size_per_vp_stage", "type": int},
    ),
)
"""Flags of Megatron that are read but not in the table, as arguments of ``add_argument``."""
_COUNTS = ("mtp_num_layers", "save_wgrads_interval", "num_experts")
"""Options whose only supported value, None, does not show that they are numbers."""


class _NeededByPairs(NamedTuple):
    """What an option must be for pairs of a forward and a backward, as megatron-core requires for its own overlap.

    Attributes:
        holds: whether a value works; None always does.
        needs: what works, in words.
        remedy: what the user can do, in words.
        flags: the same as flags, for a value, where they leave the model and its groups as they are.
    """

    option: str
    holds: Callable[[Any], bool]
    needs: str
    why: str
    remedy: str
    flags: Callable[[Any], Remedy | None] = lambda _: None


def _modules_left(modules: Sequence[str]) -> tuple[str, ...]:
    """The flag for the recomputed modules but experts."""
    left = [name for name in modules if name != "moe"]
    return ("--recompute-modules", *left) if left else ()


_NEEDED_BY_PAIRS = (
    _NeededByPairs(
        "expert_model_parallel_size",
        lambda size: size > 1,
        "2 or more",
        "without expert parallelism there is no all-to-all to hide",
        "raise it, or leave pairs out",
    ),
    _NeededByPairs(
        "moe_token_dispatcher_type",
        lambda kind: kind in ("alltoall", "flex"),
        "alltoall or flex",
        "another dispatcher has no all-to-all",
        "give --moe-token-dispatcher-type alltoall",
        lambda _: Remedy(("--moe-token-dispatcher-type", "alltoall")),
    ),
    _NeededByPairs(
        "recompute_granularity",
        lambda kind: kind == "selective",
        "selective, or left out",
        "megatron-core's plans of layers do not recompute whole layers",
        "give --recompute-granularity selective",
        lambda _: Remedy(
            ("--recompute-granularity", "selective"), ("--recompute-method", "--recompute-num-layers"), True
        ),
    ),
    _NeededByPairs(
        "moe_shared_expert_overlap",
        lambda overlaps: not overlaps,
        "False",
        "shared experts would run during the same all-to-all",
        "drop --moe-shared-expert-overlap",
        lambda _: Remedy(drops=("--moe-shared-expert-overlap",)),
    ),
    _NeededByPairs(
        "mtp_num_layers",
        lambda number: number <= 1,
        "1 or less",
        "megatron-core's plans of layers have one prediction at most",
        "lower --mtp-num-layers",
    ),
    _NeededByPairs(
        "recompute_modules",
        lambda modules: "moe" not in modules,
        "without moe",
        "megatron-core's plans of layers run the parts of an expert layer one by one",
        "leave moe out of --recompute-modules",
        lambda modules: Remedy(_modules_left(modules), ("--recompute-modules",), True),
    ),
)


def check_pairs(values: Any) -> None:
    """Reject options of Megatron with which its plans of layers do not work.

    Args:
        values: as for ``check_options``.

    Raises:
        UserError: the rule, the value and the remedy.
    """
    for option, holds, needs, why, remedy, flags in _NEEDED_BY_PAIRS:
        value = getattr(values, option, None)
        if value is not None and not holds(value):
            raise UserError(
                f"schedules that hide the all-to-all of experts need {option} to be {needs}, because {why}; got "
                f"{value!r}; {remedy}",
                remedy=flags(value),
            )
    if not getattr(values, "bf16", True) and not getattr(values, "fp16", True):
        raise UserError(
            "schedules that hide the all-to-all of experts need 16-bit parameters, because megatron-core's plans of "
            "layers do; got bf16=False and fp16=False; give --bf16"
        )


def flag_of(option: str) -> str:
    """The flag of Megatron-LM that sets an option."""
    return as_flag(_SPELLED.get(option, option))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags that ``check_options`` reads, as Megatron-LM spells them, except those that the parser has."""
    own = [rule for rule in reversed(OPTIONS) if rule.choice is not BALANCE]
    flags = {flag_of(rule.option): _arguments(rule) for rule in own} | dict(_BESIDE_THE_TABLE)
    for flag, arguments in flags.items():
        if flag not in parser._option_string_actions:
            parser.add_argument(flag, **arguments)


def _arguments(rule: OptionRule) -> dict[str, Any]:
    """Return the arguments of ``add_argument`` for an option, which by default has its allowed value."""
    if isinstance(rule.value, bool):
        return {"dest": rule.option, "action": "store_true"}
    kind = int if rule.option in _COUNTS else str if rule.value is None else type(rule.value)
    return {"dest": rule.option, "type": kind, "default": rule.value}


def check_options(values: Any, run: RunOptions, megatrons_own: bool = True) -> None:
    """Reject Megatron options that zero-bubble schedules do not support.

    Args:
        values: a ``TransformerConfig``, or the flags of a Megatron-LM job; missing options count as disabled.
        run: what runs, with what its schedules have (``Setup.having``).
        megatrons_own: whether every stage is on the rank where Megatron itself would put it.

    Raises:
        UserError: the rule, the value and the remedy.
    """
    # Reinforcement learning has graphs for rollouts, and turns them off for training unless configured otherwise.
    only_rollouts = getattr(values, "perform_rl_step", False) and not getattr(values, "rl_training_cuda_graphs", False)
    skipped = [*([ON_A_V] if megatrons_own else []), *([GRAPHS] if only_rollouts else [])]
    rules = (rule for rule in OPTIONS if not any(rule.choice is each for each in skipped))
    _check_rules(values, (rule for rule in rules if rule.choice.is_made(run)))
    if run.setup.overlaps:
        check_pairs(values)
    if getattr(values, "variable_seq_lengths", False):
        refuse_excluded(replace(run, lengths=("variable_seq_lengths", True)))
    recipe = getattr(values, "fp8_recipe", None)
    if run.setup.validates and getattr(values, "fp8", None) and getattr(recipe, "value", recipe) == "delayed":
        raise UserError(
            "post-validation does not support FP8 with delayed scaling, because forwards that run again would count "
            f"twice in the history of maxima; got --fp8-format {values.fp8} --fp8-recipe delayed; give --fp8-recipe "
            "tensorwise, or drop --zero-bubble-post-validation"
        )
    num_slices = 1 if run.setup.cuts is None else run.setup.cuts.number
    balancing = getattr(values, "moe_router_load_balancing_type", None)
    if num_slices != 1 and "seq_aux_loss" in (balancing if isinstance(balancing, (list, tuple)) else (balancing,)):
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
    if grouped and getattr(values, "fine_grained_activation_offloading", False):
        raise UserError(
            "fine-grained offloading of activations needs one stage per rank, because Megatron brings back what "
            "several stages saved in the order of its own interleaved schedule; got "
            f"--fine-grained-activation-offloading and {values.virtual_pipeline_model_parallel_size} stages per rank; "
            "drop it, or choose a schedule with one stage per rank"
        )


def _check_rules(values: Any, rules: Iterable[OptionRule]) -> None:
    for rule in rules:
        if refusal := rule.sentence(values):
            is_of_schedules = rule.choice in (SCHEDULE, GRAPHS)  # other choices have other schedules as remedies
            raise UserError(refusal, remedy=Remedy(drops=(flag_of(rule.option),)) if is_of_schedules else None)


def check_softmax(is_fused: bool) -> None:
    """Reject the softmax of the attention of local layers, if it is Megatron's fused one, under a schedule of slices.

    Raises:
        UserError: the rule, the value and the remedy.
    """
    if is_fused:
        raise UserError(
            "sequence slices cannot use Megatron's fused softmax, which needs as many queries as keys; got "
            "masked_softmax_fusion=True; add --no-masked-softmax-fusion, or use TransformerEngine"
        )


def check_shards(values: Any) -> None:
    """Reject Megatron options that sharded units do not support.

    Args:
        values: a configuration of megatron-core, or the flags of a job; missing options count as supported.

    Raises:
        UserError: the rule, the value and the remedy.
    """
    _check_rules(values, [rule for rule in OPTIONS if rule.choice is SHARDS])
