"""What a user can decide about a zero-bubble run, one row per decision: its flag, tier, values, help and default.

``flags.py`` builds the argument parser from this table, and the configuration from the parsed flags. ``--help`` shows
the core tier, ``--zero-bubble-help-all`` all of them; docs/flags.md is generated from it. What excludes what is in
``planning/exclusions.py``, and where an option has an effect in ``effects.py``.
"""

from __future__ import annotations

from typing import Any

from megatron.zero_bubble.core.plan.nccl import DEFAULT_NCCL_COLLECTIVE_CTAS, DEFAULT_NCCL_CTAS
from megatron.zero_bubble.core.plan.shard import DEFAULT_OPEN_CHUNKS
from megatron.zero_bubble.core.schedules import SCHEDULES, ZB_AUTO
from megatron.zero_bubble.core.search.placements import PLACEMENTS
from megatron.zero_bubble.planning.decision import (
    SWITCH,
    Decision,
    PlanFlag,
    ctas,
    number_or_auto,
    token_counts,
    unit_microbatches,
)
from megatron.zero_bubble.planning.observations import OBSERVATIONS
from megatron.zero_bubble.planning.retired import LOGITS, RETIRED
from megatron.zero_bubble.planning.setup import DEFAULT_CUTS, DEFAULT_LIMIT, LEAST_TOKENS

EARLY = "early"
"""What ``--zero-bubble-recompute`` has for a pass that computes whole layers again."""


def _again(text: str | None) -> dict[str, Any]:
    """Split what is computed again."""
    words = (text or EARLY).split(",")
    return {name: True for word, name in ((EARLY, "recompute"), (LOGITS, "recompute_logits")) if word in words}


def _cut(text: str | None) -> dict[str, Any]:
    """Split a number of slices, or the ends of all.

    Raises:
        argparse.ArgumentTypeError: any other text.
    """
    ends = token_counts(text or "")
    return {"num_slices": ends[0]} if len(ends) == 1 else {"slice_ends": ends}


DECISIONS = (
    Decision(
        "schedule",
        "core",
        "NAME|FILE",
        f"pipeline schedule to run: auto to decide when the run starts, as `zero-bubble advise` does; or "
        f"{', '.join(SCHEDULES)} or {ZB_AUTO}, which `zero-bubble list` describes; or a file "
        "that ends in .json or has a folder in its path, written by `zero-bubble plan --format json`: all that it "
        "decides is run, such as its layout, sharded units, vocabulary parallelism and what moves to host memory; a "
        "flag that contradicts it is refused; or a schedule in the form of torch.distributed.pipelining, if it ends "
        "in .csv",
        "Megatron's own schedule",
        path="order.name",
        plan=PlanFlag("schedule", "NAME", on_page=True),
    ),
    Decision(
        "memory-limit",
        "core",
        "LIMIT",
        f"activation-memory limit per rank for {ZB_AUTO}, and for the units of zero-pp that auto chooses, e.g. 1p "
        "(1F1B's peak, or that of the schedule that the run begins with, if it is larger) or 60GiB, which zero-pp "
        f"needs --zero-bubble-costs for; auto for {ZB_AUTO}: what is free on the fullest rank when measured",
        f"{DEFAULT_LIMIT} for {ZB_AUTO}",
        path="order.limit",
        plan=PlanFlag("memory-limit", "LIMIT", on_page=True),
        in_run=True,
    ),
    Decision(
        "exact",
        "core",
        SWITCH,
        "match stock Megatron bit for bit: round each weight gradient to the weight's dtype before it is accumulated, "
        "instead of accumulating all of a W pass in one call, in float32",
        path="exact",
    ),
    Decision(
        "post-validation",
        "core",
        ("exact", "inverse"),
        "step the optimizer before the global gradient norm is known and validate the step in the next iteration, so "
        "that ranks do not wait for each other between iterations: an iteration takes the schedule's span instead of "
        "its makespan; a rejected step is undone by restoring a copy, which with Adam takes 12 bytes per parameter "
        "that the rank steps (exact, also without a value), or by inverting the Adam update, which takes no memory "
        "and is correct only up to rounding (inverse)",
        path="step",
        split=lambda how: {"post_validation": True, **({} if how is None else {"rollback": how})},
    ),
    Decision(
        "offload",
        "core",
        "auto|all|N%|none",
        "keep activations in host memory between forward and backward: all of them, N%% of each rank's microbatches, "
        "longest lifespan first, or auto for those that delay no pass, as planned after some iterations from the "
        "measured times of passes and copies; those whose backward follows too closely stay on the device",
        "none, or what the plan in --zero-bubble-schedule moves",
        path="offload.share",
        plan=PlanFlag(
            "offload",
            "WHAT",
            None,
            "activations to keep in host memory between F and B: auto for the least peak that delays no pass (with "
            "--memory-limit: as few as meet it, with the least delay), all, a share of the microbatches such as 50%%, "
            "or none (default: none)",
            True,
        ),
        in_run=True,
    ),
    Decision(
        "vocabulary-parallel",
        "core",
        ("off", "1", "2"),
        "divide embedding and output layer over all pipeline ranks, so that no rank waits for the last one: with "
        "algorithm 1, all ranks wait for each other twice per microbatch, with algorithm 2 once, for one more product "
        "of matrices in the forward and one less in the backward",
        "off",
        field="vocabulary",
        path="vocabulary.algorithm",
        plan=PlanFlag(
            "vocabulary",
            ("off", "1", "2", "auto"),
            None,
            "vocabulary parallelism, which divides the output layer and the embedding over all ranks: off, with two "
            "barriers per microbatch (1) or one (2), or whichever is shortest within the memory limit (auto) (default: "
            "auto if the costs have the times of S and T, else off)",
            True,
        ),
        by_auto=True,
    ),
    Decision(
        "overlap-experts",
        "advanced",
        SWITCH,
        "in a model with experts, run the forward of one microbatch and the backward of another together, layer by "
        "layer, so that each hides the all-to-all of the other's experts, as Megatron's "
        "--overlap-moe-expert-parallel-comm does in its own schedule; with --zero-bubble-schedule interleaved-1f1b "
        "or dualpipe-v; other schedules with 2 or more stages per rank, such as zb-v, only run the weight gradients of "
        "experts beneath the dispatch of their own backward",
        path="pairs",
        plan=PlanFlag("pairs", SWITCH, on_page=True),
        by_auto=True,
    ),
    Decision(
        "shard-weights",
        "core",
        ("collective", "on-demand"),
        "keep of each stage only a shard per data-parallel replica: gather its weights when its passes need them, once "
        "per unit of microbatches, so that at most --zero-bubble-whole-stages of a rank are whole, and reduce its "
        "gradients once per unit; the optimizer steps shards; needs --use-distributed-optimizer and 2 or more stages "
        "per rank, for example --zero-bubble-schedule zero-pp; without effect on the results but for the order in "
        "which the gradients of units are added; replicas exchange shards by collectives (collective, also without a "
        "value), or point to point, so that no replica waits until the others reach the same unit (on-demand, "
        "experimental)",
        path="shards",
        split=lambda how: {"shard_weights": True, **({} if how is None else {"shard_transport": how})},
        plan=PlanFlag(
            "shard-weights",
            SWITCH,
            None,
            "shard weights and gradients over replicas, as --zero-bubble-shard-weights does: gather weights and "
            "reduce gradients once per unit; needs 2 or more stages per rank",
        ),
        by_auto=True,
    ),
    Decision(
        "slices",
        "advanced",
        "N|TOKENS",
        f"slices into which {ZB_AUTO}, and schedules whose name begins with seq-, cut every sequence: their number, or "
        "the ends of all in tokens, e.g. 1536,2560,3392,4096, the last one being the sequence length",
        f"{DEFAULT_CUTS}, or 1 for {ZB_AUTO} without --zero-bubble-attention-share",
        path="cuts",
        split=_cut,
    ),
    Decision(
        "attention-share",
        "advanced",
        "SHARE",
        "share of a forward that attention takes, from 0 to 1: cut sequences into slices that take equal time, "
        "instead of equally long ones; a run with equally long slices and --zero-bubble-record-costs measures it; with "
        "--zero-bubble-balance-microbatches, the share for --seq-length tokens, instead of an estimate",
        parse=float,
        path="cuts.places",
    ),
    Decision(
        "recompute",
        "advanced",
        (EARLY, LOGITS, f"{EARLY},{LOGITS}"),
        "compute again in a pass of its own, ahead of the backward, the layers of --recompute-granularity full, while "
        "their gradient is under way, and keep their activations until then (early, also without a value); with "
        "--zero-bubble-vocabulary-parallel, compute the logits again, in blocks of tokens, for the weight gradient of "
        "the output layer, instead of keeping their softmax, 4 bytes per token and entry of the rank's part of the "
        "vocabulary (logits); or both (early,logits)",
        "whole layers within their backward, or as the plan in --zero-bubble-schedule says, and no logits",
        field="early_recompute",
        path="early_recompute",
        split=_again,
        word=EARLY,
        plan=PlanFlag(
            "early-recompute",
            SWITCH,
            None,
            "with full recomputation: compute layers again in a pass of its own (R), which does not wait for the "
            "gradient of the next stage, instead of at the start of each layer's backward; it keeps the activations of "
            "these layers from R to B; needs --config of such a job, or costs with recompute_ms; a job runs it with "
            "--zero-bubble-recompute early, or from the plan's file",
        ),
        by_auto=True,
    ),
    Decision(
        "keep-faster",
        "advanced",
        SWITCH,
        f"{ZB_AUTO} begins with Megatron's own schedule of its placement, if there is one within the memory limit, and "
        "goes back to what it began with if its plan proves slower",
        path="order.keep_faster",
    ),
    Decision(
        "placement",
        "advanced",
        tuple(PLACEMENTS),
        f"stage placement for {ZB_AUTO}: one stage per rank (linear), two per rank in a V (vee), several in a loop as "
        "in Megatron's virtual pipeline (loop), or an even number in a wave to the last rank and back (wave); "
        "`zero-bubble plan --placement auto --num-chunks auto` shows which is best",
        "linear",
        path="order.placement",
        plan=PlanFlag("placement", (*PLACEMENTS, "auto"), on_page=True),
        by_auto=True,
    ),
    Decision(
        "num-chunks",
        "advanced",
        "N",
        f"stages per rank of an interleaved schedule, or of {ZB_AUTO} on a loop or in a wave",
        "what the job has as virtual stages, else 2, and 4 for a wave",
        int,
        path="order.stages",
        plan=PlanFlag("num-chunks", "N|auto", number_or_auto, on_page=True),
        by_auto=True,
    ),
    Decision(
        "host-memory",
        "advanced",
        "LIMIT",
        "limit per rank of the host memory that --zero-bubble-offload takes, e.g. 60GiB; a rank that needs more ends "
        "the run",
        "no limit",
        path="offload.host_memory",
        plan=PlanFlag(
            "host-memory", "SIZE", None, "limit of host memory per rank, for example 200GiB (default: no limit)"
        ),
    ),
    Decision(
        "unit-microbatches",
        "advanced",
        "U|auto",
        "microbatches of a unit of zero-pp, and after which --zero-bubble-shard-weights reduces gradients: larger "
        "units communicate less and keep more activations",
        "auto, for zero-pp the smallest units that take no longer than one unit of all microbatches, or with "
        "--zero-bubble-costs or --zero-bubble-memory-limit those of the shortest schedule, and else one microbatch per "
        "pipeline rank",
        unit_microbatches,
        path="unit",
        plan=PlanFlag(
            "unit-microbatches",
            "U|auto",
            unit_microbatches,
            "microbatches of a unit of zero-pp, and after which --shard-weights reduces gradients (default: auto, for "
            "zero-pp those of the shortest schedule within the memory limit, else one microbatch per rank)",
        ),
    ),
    Decision(
        "costs",
        "advanced",
        "FILE",
        "costs file of an earlier run, as --zero-bubble-record-costs writes it, by which zero-pp chooses its units; if "
        "that run sharded weights too, the file has the times of its collectives",
        "passes of equal length, and collectives that take no time",
        field="costs_file",
        path="order.costs",
    ),
    Decision(
        "whole-stages",
        "advanced",
        "K",
        "the most stages of a rank whose weights are whole at a time with --zero-bubble-shard-weights: fewer take less "
        "memory and more gathers, and with 1 no gather runs during passes",
        "2",
        int,
        path="shards.whole_stages",
        plan=PlanFlag(
            "whole-stages",
            "K|auto",
            number_or_auto,
            "the most stages of a rank whose weights are whole at a time; auto is the fewest of the shortest schedule "
            "within the memory limit, chosen together with the units (default: auto where --memory-limit includes "
            f"weights, that is in bytes with --config, else {DEFAULT_OPEN_CHUNKS})",
        ),
    ),
    Decision(
        "balance-microbatches",
        "advanced",
        SWITCH,
        "train on documents of their own lengths, cut only at --seq-length, and give every data-parallel replica equal "
        "work instead of equally many microbatches; samples are packed into microbatches of at most --micro-batch-size "
        "* --seq-length tokens; --global-batch-size counts documents; needs --calculate-per-token-loss",
        field="",
    ),
    Decision(
        "post-receives",
        "expert",
        ("early", "late"),
        "when a rank posts the receive of a message: one pass ahead of the pass that needs it, so that the transfer "
        "overlaps the previous pass (early), or directly before that pass, so that no receive of NCCL takes "
        "multiprocessors from the previous pass while it waits (late); which is faster has not been measured; late "
        "receives of schedules with several stages per rank may need CUDA_DEVICE_MAX_CONNECTIONS above 1",
        "early",
        path="messages.receives",
    ),
    Decision(
        "nccl-ctas",
        "expert",
        "N[,M]",
        "largest number of CTAs, and so of multiprocessors, that NCCL occupies for a message between two pipeline "
        "ranks, and M for a collective of --zero-bubble-vocabulary-parallel, which all pipeline ranks start for each "
        "microbatch, also while it waits: fewer leave more of the GPU to the passes, more make the transfer faster; "
        "the best number has not been measured; Megatron's --nccl-communicator-config-path takes precedence; without "
        "effect over gloo",
        f"{DEFAULT_NCCL_CTAS},{DEFAULT_NCCL_COLLECTIVE_CTAS}",
        path="messages.ctas",
        split=ctas,
    ),
    *OBSERVATIONS,
    *RETIRED,
)
"""Every decision, the most important first."""

REMOVED = {"wgrad-stream": "it made no iteration shorter on an H200, and one took 8 GiB more"}
"""Flags of earlier versions, and why they are gone; a job that gives one is refused for one release."""
LAYOUT = Decision(
    "layout",
    "advanced",
    "LAYOUT",
    "layers of every stage, by Megatron's --pipeline-model-parallel-layout",
    path="layout",
    plan=PlanFlag(
        "layout",
        ("even", "auto"),
        None,
        "layers per stage: equally many (even), or chosen together with the placement for the shortest schedule "
        "within the memory limit (auto), which needs --config, or a costs file with costs per layer (default: even)",
    ),
)
"""The decision for which a job has a flag of Megatron's own."""
OF_PLANS = (
    Decision(
        "equal-passes",
        "advanced",
        SWITCH,
        "the order for passes of equal length",
        path="order.equal_passes",
        plan=PlanFlag("equal-passes", SWITCH, on_page=True),
    ),
    Decision(
        "min-slice-tokens",
        "advanced",
        "TOKENS",
        "fewest tokens of a slice",
        path="cuts.least_tokens",
        plan=PlanFlag(
            "min-slice-tokens",
            "TOKENS",
            int,
            "fewest tokens per slice for --num-slices auto, with --config or a costs file that has the length of "
            "sequences (default: what a run has measured for the costs file, else "
            f"{LEAST_TOKENS}; if the length is unknown, up to 16 slices are tried)",
        ),
    ),
)
"""Decisions that only a plan makes: a job has what came of them."""


def plan_flag(name: str) -> PlanFlag:
    """The flag of ``plan`` for a decision, by its name."""
    flag = next(row.plan for row in (*DECISIONS, LAYOUT, *OF_PLANS) if row.name == name)
    assert flag is not None, f"plan decides {name}"
    return flag
