"""Which jobs can balance samples of different length over their replicas, and the cost of a sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron.zero_bubble.costs.estimate import DEVICES, estimate
from megatron.zero_bubble.costs.lengths import LengthCost
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.ir import Placement
from megatron.zero_bubble.job.model import model_of
from megatron.zero_bubble.job.needs import Need
from megatron.zero_bubble.planning.source import AUTO, ScheduleSource

FIXED_PART = 1 / 16
"""The fixed time of a microbatch, as that of a short sample with this part of ``--seq-length``. It stands for kernels
that are too short to fill the device; without it, no two samples would share a microbatch."""


_NEEDS = (
    Need(
        "calculate_per_token_loss",
        True,
        "a mean over microbatches would weight tokens by the number of microbatches of their replica",
        "give --calculate-per-token-loss",
    ),
    Need(
        "num_moe_experts",
        None,
        "experts exchange tokens between replicas, which then need equally many microbatches, and they would route the "
        "padding",
        "drop --num-experts",
    ),
    Need("mtp_num_layers", None, "the loss of multi-token prediction is a mean over microbatches", "drop it"),
    Need("context_parallel_size", 1, "samples are not divided over ranks", "drop --context-parallel-size"),
    Need("fp8", None, "FP8 needs samples of a multiple of 16 tokens", "drop --fp8-format"),
    Need(
        "reset_attention_mask",
        False,
        "every sample is one document already",
        "drop --reset-attention-mask",
    ),
)

_EXCLUDED: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    ("--zero-bubble-schedule-file", lambda options: options.zero_bubble_schedule_file),
    (f"--zero-bubble-schedule {AUTO}", lambda options: options.zero_bubble_schedule == AUTO),
    ("--zero-bubble-post-validation", lambda options: options.zero_bubble_post_validation),
    ("--zero-bubble-offload", lambda options: options.zero_bubble_offload not in (None, "none")),
    (
        "--zero-bubble-shard-weights without --zero-bubble-shard-transport on-demand",
        lambda options: options.zero_bubble_shard_weights and options.zero_bubble_shard_transport != "on-demand",
    ),
    ("--zero-bubble-trace", lambda options: options.zero_bubble_trace),
    ("--zero-bubble-record-costs", lambda options: options.zero_bubble_record_costs),
    (
        "--zero-bubble-vocabulary-parallel",
        lambda options: options.zero_bubble_vocabulary_parallel not in (None, "off"),
    ),
)


def check_balance(options: Any, source: ScheduleSource, job: Any) -> None:
    """Reject jobs that cannot run different numbers of microbatches of different lengths.

    Args:
        options: the parsed ``--zero-bubble-*`` flags.
        job: the job's flags.

    Raises:
        UserError: the rule, the value and the remedy.
    """
    for flag, is_given in _EXCLUDED:
        if is_given(options):
            raise UserError(
                "--zero-bubble-balance-microbatches needs a schedule by name whose microbatches may differ in length "
                f"and number between replicas; got {flag}, which does not support that in this version; drop one of "
                "both flags"
            )
    for need in _NEEDS:
        value = getattr(job, need.name, need.value)
        if value != need.value and (value is not None or need.value is not None):
            raise UserError(
                f"--zero-bubble-balance-microbatches needs {need.name}={need.value!r}, because {need.why}; got "
                f"{value!r}; {need.remedy}"
            )
    length_cost(options, job, None)
    if len(source.make(1).slices) > 1:
        raise UserError(
            "--zero-bubble-balance-microbatches needs a schedule of whole sequences, because slices would have another "
            f"length in every microbatch; got {source.name}; give --zero-bubble-schedule zb-h1"
        )


def length_cost(options: Any, job: Any, vocabulary: int | None) -> LengthCost:
    """The cost of samples, from ``--zero-bubble-attention-share`` if given, else from the shapes of the model.

    Args:
        vocabulary: the padded size of the vocabulary, if it is known.
    """
    length = job.seq_length
    if options.zero_bubble_attention_share is not None:
        return LengthCost.of_share(options.zero_bubble_attention_share, length, FIXED_PART * length)
    model = model_of(job, (job.num_layers,))
    if vocabulary is not None:
        model = replace(model, vocabulary=vocabulary)
    costs, _ = estimate(model, DEVICES["a100"], Placement.linear(1))
    return LengthCost.of_passes(costs, length, FIXED_PART * length)
