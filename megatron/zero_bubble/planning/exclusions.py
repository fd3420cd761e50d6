"""What excludes what: choices each other, in one symmetric table, and choices the options of Megatron.

A job, its dry run, ``plan``, ``compare`` and the playground ask the same rows before any search and before a job
starts, and so refuse in the same words. An option that a later Megatron adds counts as disabled where it is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.plan.offload import parse_share
from megatron.zero_bubble.core.schedules import sliced
from megatron.zero_bubble.planning.decision import Spell, in_fields
from megatron.zero_bubble.planning.offload import AUTO
from megatron.zero_bubble.planning.rule import Choice, Exclusion, OptionRule, Shown
from megatron.zero_bubble.planning.run_options import RunOptions
from megatron.zero_bubble.planning.setup import Given, Searched, Setup


def refuse_excluded(run: RunOptions, spell: Spell = in_fields) -> None:
    """Refuse choices that exclude each other. Call it before any search, and before a job starts.

    Args:
        spell: writes a decision as the user gave it; by default, as a field of ``ZeroBubbleConfig``.

    Raises:
        UserError: two of them are made; the sentence names both.
    """
    if (row := excluded(run)) is not None:
        raise UserError(row.sentence(run, spell))


def excluded(run: RunOptions) -> Exclusion | None:
    """The first row that refuses these options."""
    return next((row for row in EXCLUSIONS if row.sentence(run)), None)


def _if(name: str, holds: Callable[[Setup], object]) -> Callable[[RunOptions], list[Shown]]:
    """A choice that is a switch, shown by the decision of a name."""
    return lambda run: [(name, True)] if holds(run.setup) else []


def _slices(run: RunOptions) -> Iterator[Shown]:
    if run.setup.name in sliced():
        yield "schedule", run.setup.name
    cuts = run.setup.cuts
    if cuts is None or cuts.number == 1:
        return
    if isinstance(cuts.places, float):
        yield "attention_share", cuts.places
    elif cuts.number is not None:
        yield "num_slices", cuts.number
    elif cuts.places != "even":
        yield "slice_ends", cuts.places


def _vocabulary(run: RunOptions) -> Iterator[Shown]:
    if run.setup.vocabulary is not None:
        yield "vocabulary", run.setup.vocabulary.algorithm


def _offload(run: RunOptions) -> Iterator[Shown]:
    share = None if run.setup.offload is None else run.setup.offload.share
    if share is not None and (share == AUTO or parse_share(share)):
        yield "offload", share
    elif run.setup.moves_by_plan:
        yield "schedule_file", run.setup.name


def _pairs(run: RunOptions) -> Iterator[Shown]:
    if run.setup.pairs:
        yield "overlap_experts", True
    elif run.setup.overlaps:
        yield "schedule_file", run.setup.name


def _early(run: RunOptions) -> Iterator[Shown]:
    if run.setup.early_recompute:
        yield ("early_recompute", True) if run.setup.plan is None else ("schedule_file", run.setup.name)


def _lengths(run: RunOptions) -> Iterator[Shown]:
    if run.lengths is not None:
        yield run.lengths


def _recorded_costs(run: RunOptions) -> Iterator[Shown]:
    if (file := run.observations.record_costs) is not None:
        yield "record_costs", file


def _order(name: str, kind: type) -> Callable[[RunOptions], list[Shown]]:
    return lambda run: [(name, run.setup.name)] if isinstance(run.setup.order, kind) else []


PLANS = Choice("zb-auto", _order("schedule", Searched))
SCHEDULE_FILE = Choice("a schedule file", _order("schedule_file", Given))
SLICES = Choice("sequence slices", _slices)
VOCABULARY = Choice(
    "vocabulary parallelism",
    _vocabulary,
    how="give <vocabulary=2>",
    refined_by=(
        ("recompute_logits", ", whose passes compute the logits; got {schedule} without it"),
        ("nccl_collective_ctas", ", whose collectives it limits; got {schedule} without it"),
    ),
)
OFFLOAD = Choice(
    "offloading", _offload, how="give <offload=all>", refined_by=(("host_memory", ", whose memory it limits"),)
)
MEASURED_OFFLOAD = Choice(
    "offloading that is planned by times", lambda run: [row for row in _offload(run) if row[1] == AUTO]
)
SHARDS = Choice(
    "sharded units",
    _if("shard_weights", lambda setup: setup.shards),
    "sharded units",
    "give <shard_weights>",
    (
        ("shard_transport", ", whose shards it exchanges"),
        ("whole_stages", ", of whose stages so many are whole at most"),
    ),
)
COLLECTIVES = Choice(
    "sharded units without shard_transport=on-demand",
    _if("shard_weights", lambda setup: setup.shards and not setup.exchanges),
)
POST_VALIDATION = Choice(
    "post-validation",
    _if("post_validation", lambda setup: setup.validates),
    how="give <post_validation>",
    refined_by=(("rollback", ", whose steps it undoes"),),
)
BALANCE = Choice(
    "balanced microbatches",
    lambda run: [] if run.balance is None else [("balance_microbatches", True)],
    "balanced microbatches",
)
RECORDED_COSTS = Choice("recorded costs", _recorded_costs)
UNTOLD_LENGTHS = Choice("microbatches of different lengths", _lengths)
LENGTHS = Choice(UNTOLD_LENGTHS.words, lambda run: [*_lengths(run), *BALANCE.shown_by(run)])
PAIRS = Choice("pairs", _pairs, "schedules that hide the all-to-all of experts")
EARLY = Choice("early recomputation", _early)
SCHEDULE = Choice("a zero-bubble schedule", lambda run: [("schedule", run.setup.name)], "zero-bubble schedules")
"""What is always chosen where options are checked."""
ON_A_V = Choice("stages on a V or in a wave", SCHEDULE.shown_by)
IN_SEQUENCE = Choice(
    "a schedule that does not hide the all-to-all of experts",
    lambda run: [] if run.setup.overlaps else SCHEDULE.shown_by(run),
    "zero-bubble schedules that do not hide the all-to-all of experts",
)
REFINED = (OFFLOAD, SHARDS, VOCABULARY, POST_VALIDATION)
"""Choices that other decisions refine."""
_TO_ONE_LENGTH = "pad all microbatches to one length, or leave the other one out"
_ONE_LENGTH = "its moves are chosen by the bytes and times of one length"
_BY_SHARE = "give <offload=all>"

EXCLUSIONS = (
    Exclusion(SLICES, VOCABULARY, "the passes of the vocabulary take whole sequences"),
    Exclusion(SHARDS, POST_VALIDATION, "a rank that undoes a step would stop between the collectives of its units"),
    Exclusion(SHARDS, VOCABULARY, "this version does not shard a rank's part of the vocabulary"),
    Exclusion(BALANCE, SCHEDULE_FILE, "a file has one number of microbatches for all replicas"),
    Exclusion(
        BALANCE,
        PLANS,
        "its plans are for equal microbatches on all replicas",
        "give another schedule, such as zb-h1",
    ),
    Exclusion(BALANCE, COLLECTIVES, "replicas would wait for each other in every unit", "add the transport on demand"),
    Exclusion(LENGTHS, SLICES, "sequences are cut at the same tokens in all microbatches", _TO_ONE_LENGTH),
    Exclusion(LENGTHS, VOCABULARY, "its collectives have the rows of one length", _TO_ONE_LENGTH),
    Exclusion(LENGTHS, MEASURED_OFFLOAD, _ONE_LENGTH, _BY_SHARE),
    Exclusion(PAIRS, SLICES, "the all-to-alls of experts are known for whole sequences"),
    Exclusion(PAIRS, VOCABULARY, "the passes of the vocabulary would be part of pairs"),
    Exclusion(PAIRS, SHARDS, "their collectives would compete with the all-to-alls of experts"),
    Exclusion(PAIRS, RECORDED_COSTS, "the two passes of a pair have no times of their own"),
    Exclusion(EARLY, PAIRS, "megatron-core's plans of layers do not recompute whole layers"),
    Exclusion(EARLY, OFFLOAD, "what is recomputed is on the device until its backward"),
    Exclusion(EARLY, SHARDS, "this version gathers weights for F and B only"),
    Exclusion(LENGTHS, PAIRS, "this version pairs only microbatches of equal length"),
    Exclusion(UNTOLD_LENGTHS, RECORDED_COSTS, "passes of different lengths have no common times", _TO_ONE_LENGTH),
)
"""What cannot be combined in this version."""

_FSDP = "FSDP does not reduce gradients through DistributedDataParallel"
_MAXIMUM = "forwards that run again would count twice in the maximum of the attention logits"
_OFFLOAD = "offloading assumes Megatron's order of backward passes"
_WIDER = "no known version of Megatron says what its stages send"
_SHARED_MEMORY = "weights are gathered into the memory of the gradients, which the validation may need"
_PREDICTED = "the loss of multi-token prediction is a mean over microbatches"
_COPIES = "TransformerEngine keeps whole copies of the weights in this precision"
_PER_TOKEN = "a mean over microbatches would weight tokens by the microbatches of their replica"
_DROP_LAYERS = "drop --cpu-offloading-num-layers"
_NO_PLANS = "megatron-core plans the layers of GPTModel only"
HYBRID = (("hybrid_layer_pattern", None), ("hybrid_override_pattern", None), ("is_hybrid_model", False))
"""What a hybrid model has: a pattern of layers, by the older flag until core_r0.16, or none, where all have a scan."""
STREAMS = ("enable_hyper_connections", "enable_mhc_connections")
"""What adds residual streams: an option of Megatron's dev branch, or of its main branch."""
_UNTRIED = "they have not been compared with stock where there are several residual streams"


def _done_by_itself(option: str, why: str) -> OptionRule:
    """A row for an option that is switched off, because the schedule does in its place what it asks for."""
    return OptionRule(SCHEDULE, option, False, why, is_set=True)


OPTIONS = (
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
    OptionRule(SLICES, "context_parallel_size", 1, "its attention takes no more keys than queries"),
    OptionRule(SLICES, "mtp_use_repeated_layer", False, "its depths would share the keys and values of a sequence"),
    OptionRule(SLICES, "mtp_hsm", False, "its depths mix hidden states of tokens in the next slice"),
    OptionRule(SLICES, "sft", False, "its rotary embeddings begin at the first token of a sample"),
    OptionRule(SLICES, "tp_comm_overlap", False, "its buffers have the size of whole sequences"),
    *(OptionRule(PAIRS, name, value, _NO_PLANS, "train without pairs") for name, value in HYBRID),
    OptionRule(VOCABULARY, "mtp_detach_heads", False, "T adds the gradients of all depths to the output layer"),
    OptionRule(VOCABULARY, "label_smoothing_factor", 0.0, "it needs the logits of all tokens in the loss"),
    OptionRule(VOCABULARY, "logits_save_dir", None, "no rank has whole logits"),
    OptionRule(VOCABULARY, "logits_load_dir", None, "no rank has whole logits"),
    OptionRule(VOCABULARY, "defer_embedding_wgrad_compute", False, "T already defers the weight gradient"),
    OptionRule(VOCABULARY, "use_mup", False, "its scaled logits are not supported"),
    OptionRule(VOCABULARY, "init_model_with_meta_device", False, "initial weights are cut into shards"),
    OptionRule(
        SHARDS, "use_distributed_optimizer", True, "replicas step their own shards", "give --use-distributed-optimizer"
    ),
    OptionRule(SHARDS, "optimizer", "adam", "the state of no other is divided", "give --optimizer adam"),
    OptionRule(SHARDS, "use_precision_aware_optimizer", False, "shards are stepped with gradients in float32"),
    OptionRule(SHARDS, "overlap_grad_reduce", False, "the schedule itself reduces gradients, during the passes"),
    OptionRule(SHARDS, "overlap_param_gather", False, "the schedule itself gathers weights, during the passes"),
    OptionRule(SHARDS, "save_wgrads_interval", None, "every replica has only its shard of the gradients"),
    OptionRule(SHARDS, "num_distributed_optimizer_instances", 1, "this version shards over all replicas"),
    OptionRule(SHARDS, "context_parallel_size", 1, "replicas must have whole sequences in this version"),
    OptionRule(SHARDS, "fp8", None, _COPIES, "drop --fp8-format"),
    OptionRule(SHARDS, "fp4", None, _COPIES, "drop --fp4-format"),
    OptionRule(SHARDS, "nccl_ub", False, "buffers that are registered with NCCL cannot be freed", "drop --use-nccl-ub"),
    OptionRule(SHARDS, "optimizer_cpu_offload", False, "the optimizer steps shards where they are"),
    OptionRule(SHARDS, "defer_embedding_wgrad_compute", False, "what it adds after the passes would not be reduced"),
    OptionRule(BALANCE, "calculate_per_token_loss", True, _PER_TOKEN, "give --calculate-per-token-loss"),
    OptionRule(BALANCE, "mtp_num_layers", None, _PREDICTED, "drop it"),
    OptionRule(BALANCE, "context_parallel_size", 1, "samples are not divided over ranks"),
    OptionRule(BALANCE, "fp8", None, "FP8 needs samples of a multiple of 16 tokens", "drop --fp8-format"),
    OptionRule(BALANCE, "reset_attention_mask", False, "every sample is one document already"),
    *(OptionRule(LENGTHS, name, False, _UNTRIED) for name in STREAMS),
)
"""For each choice, the only values that it supports; None is always supported."""
