"""Where each option of a job has an effect: everywhere else it is refused, so that no typo or leftover goes unnoticed.

The rows are checked on the flags as they are given, and on a ``ZeroBubbleConfig``. What only a job knows has the names
``under_launcher``, ``shows_stock_passes``, ``train_iters`` and ``first_recorded`` (``rules.py``).
"""

from __future__ import annotations

from collections.abc import Callable

from megatron.zero_bubble.core.schedules import ZB_AUTO, has_units, sliced
from megatron.zero_bubble.core.search.placements import HAS_CHUNKS
from megatron.zero_bubble.planning.exclusions import (
    BALANCE,
    OFFLOAD,
    PLANS,
    POST_VALIDATION,
    RECORDS,
    SCHEDULE_FILE,
    SHARDS,
    VOCABULARY,
)
from megatron.zero_bubble.planning.rule import Choice, Choices, Rule, chosen


def _if(words: str, field: str, holds: Callable[[Choices], bool]) -> Choice:
    return Choice(words, lambda own: [field] if holds(own) else [])


def _either(words: str, *choices: Choice) -> Choice:
    return Choice(words, lambda own: [field for choice in choices for field in choice.shown_by(own)])


def _in_the_run(own: Choices) -> bool:
    last = own.get("train_iters")
    return last is None or own.get("first_recorded", 0) <= last


SCHEDULE = Choice("a zero-bubble schedule", chosen("schedule", "schedule_file"), "zero-bubble schedules")
_BY_NAME = _if("interleaved schedules by name", "schedule", lambda own: own.get("schedule") not in (None, ZB_AUTO))
_HAS_CHUNKS = _if(
    f"{ZB_AUTO} on a loop or in a wave",
    "placement",
    lambda own: own.get("schedule") == ZB_AUTO and own.get("placement") in HAS_CHUNKS,
)
_CUT = _if(f"a schedule of slices or {ZB_AUTO}", "schedule", lambda own: own.get("schedule") in (*sliced(), ZB_AUTO))
_HAS_UNITS = _if("zero-pp", "schedule", lambda own: has_units(own.get("schedule")))
_CHOSEN_UNITS = _if(
    "zero-pp without unit_microbatches",
    "schedule",
    lambda own: has_units(own.get("schedule")) and not own.get("unit_microbatches"),
)
_OWN_LOOP = _if("scripts/pretrain_gpt.py", "under_launcher", lambda own: not own.get("under_launcher"))
_OBSERVED = Choice(
    "a zero-bubble schedule, or on 2 or more pipeline ranks with one stage each",
    chosen("schedule", "schedule_file", "shows_stock_passes"),
)
_RECORDED = Choice("--zero-bubble-trace or --zero-bubble-record-costs", RECORDS.shown_by)
_RUN = _if("iterations of the run", "trace_iterations", _in_the_run)
_ZB_H1 = "give --zero-bubble-schedule zb-h1"
_SEQ_ZB_H1 = "give <schedule=seq-zb-h1>"


def _rules(fields: str, needs: Choice, why: str, instead: str) -> list[Rule]:
    remedy = f"leave it out, or {instead}"
    return [Rule(Choice(field, _is_given(field)), needs, True, why, remedy) for field in fields.split()]


def _is_given(field: str) -> Callable[[Choices], list[str]]:
    return lambda own: [field] if own.get(field) is not None else []


EFFECTS = (
    *_rules(
        "post_validation",
        SCHEDULE,
        ", whose passes validate the optimizer step; got none",
        "give --zero-bubble-schedule zb-h2",
    ),
    *_rules(
        "exact fuse_wgrad post_receives nccl_ctas offload host_memory shard_weights balance_microbatches",
        SCHEDULE,
        "; got none",
        _ZB_H1,
    ),
    *_rules(
        "balance_microbatches",
        _OWN_LOOP,
        ", because Megatron-LM pads or packs every sample to --seq-length, and counts one number of microbatches for "
        "all replicas",
        "train with scripts/pretrain_gpt.py",
    ),
    *_rules("host_memory", OFFLOAD, ", whose memory it limits", "give <offload=all>"),
    *_rules("shard_transport", SHARDS, ", whose shards it exchanges", "give <shard_weights>"),
    *_rules(
        "unit_microbatches",
        _either("zero-pp or sharded units", _HAS_UNITS, SHARDS),
        "; got {schedule}",
        "give <schedule=zero-pp>",
    ),
    *_rules("whole_stages", SHARDS, ", of whose stages so many are whole at most", "give <shard_weights>"),
    *_rules("num_slices slice_ends", _either(_CUT.words, _CUT, SCHEDULE_FILE), "; got {schedule}", _SEQ_ZB_H1),
    *_rules("attention_share", _either(_CUT.words, _CUT, BALANCE), "; got {schedule}", _SEQ_ZB_H1),
    *_rules(
        "num_chunks",
        _either(f"{_BY_NAME.words}, or {_HAS_CHUNKS.words}", _BY_NAME, _HAS_CHUNKS, SCHEDULE_FILE),
        "; got {schedule}",
        "name a schedule or placement",
    ),
    *_rules("vocabulary", SCHEDULE, ", into which its passes are inserted; got none", _ZB_H1),
    *_rules(
        "recompute_logits",
        VOCABULARY,
        ", whose passes compute the logits; got {schedule} without it",
        "give <vocabulary=2>",
    ),
    *_rules(
        "nccl_collective_ctas",
        VOCABULARY,
        ", whose collectives it limits; got {schedule} without it",
        "give <vocabulary=2>",
    ),
    *_rules(
        "placement",
        _either(PLANS.words, PLANS, SCHEDULE_FILE),
        ", because every other schedule defines its placement; got {schedule}",
        "choose zb-auto",
    ),
    *_rules(
        "memory_limit",
        _either(f"{ZB_AUTO}, or {_CHOSEN_UNITS.words}", PLANS, _CHOSEN_UNITS),
        ", because every other schedule has a fixed peak; got {schedule}",
        "choose one of the two",
    ),
    *_rules("keep_faster", PLANS, ", which changes schedules during the run; got {schedule}", "choose zb-auto"),
    *_rules("costs_file", _CHOSEN_UNITS, ", whose units it chooses; got {schedule}", "choose zero-pp"),
    *_rules("rollback", POST_VALIDATION, ", whose steps it undoes", "give <post_validation>"),
    *_rules(
        "trace log_bubble",
        _either(SCHEDULE.words, SCHEDULE, _OWN_LOOP),
        " to measure; got none",
        "give --zero-bubble-schedule 1f1b, which has the order of stock Megatron",
    ),
    *_rules("record_costs", SCHEDULE, " that splits every backward into B and W; got none", _ZB_H1),
    *_rules(
        "trace log_bubble",
        _OBSERVED,
        ", because passes of stock Megatron can be observed only then",
        "change the pipeline",
    ),
    *_rules("trace_iterations", _RECORDED, ", whose iterations it selects", "give --zero-bubble-trace DIR"),
    *_rules(
        "trace_iterations",
        _RUN,
        ", which begins with 1 and ends with {last}",
        "list earlier ones, or raise --train-iters",
    ),
)
"""One rule per option: what it has an effect with, in the order in which they are checked."""
