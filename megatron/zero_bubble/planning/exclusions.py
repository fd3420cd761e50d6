"""Which choices exclude each other: one symmetric table, asked before any search and before a job starts.

A job, its dry run, ``plan``, ``compare`` and the playground ask the same rows, and so refuse in the same words.
"""

from __future__ import annotations

from megatron.zero_bubble.core.plan.offload import parse_share
from megatron.zero_bubble.core.schedules import ZB_AUTO, sliced
from megatron.zero_bubble.planning.rule import Choice, Choices, Rule, Spell, check, chosen, is_chosen, is_value


def refuse_excluded(choices: Choices, spell: Spell | None = None) -> None:
    """Refuse choices that exclude each other. Call it before any search, and before a job starts.

    Args:
        spell: writes a field and its value as the user gave them; by default ``field=value``.

    Raises:
        UserError: two of them are made; the sentence names both.
    """
    check(EXCLUSIONS, choices, spell=spell)


def _slices(choices: Choices) -> list[str]:
    if choices.get("schedule") in sliced():
        return ["schedule"]
    if str(number := choices.get("num_slices")) == "1":
        return []
    if number is not None:
        return ["num_slices"]
    share = () if choices.get("balance_microbatches") else ("attention_share",)  # else it is for the cost of samples
    return chosen("slice_ends", "slice_cuts", *share)(choices)


def _offload(choices: Choices) -> list[str]:
    share: str = choices.get("offload") or "none"
    if not is_chosen(share) or (share != "auto" and not parse_share(share)):
        return chosen("moves")(choices)
    return ["offload"]


def _of_one_length(choices: Choices) -> list[str]:
    return ["offload"] if choices.get("offload") == "auto" else []


def _by_collectives(choices: Choices) -> list[str]:
    return [] if choices.get("shard_transport") == "on-demand" else SHARDS.shown_by(choices)  # type: ignore[return-value]


PLANS = Choice(ZB_AUTO, lambda choices: ["schedule"] if choices.get("schedule") == ZB_AUTO else [])
SCHEDULE_FILE = Choice("a schedule file", chosen("schedule_file"))
BY_NAME = Choice("a schedule by name", chosen("schedule"))
SLICE_ENDS = Choice("ends of slices", chosen("slice_ends"))
OTHER_CUTS = Choice("another choice of cuts", chosen("num_slices", "attention_share"))
SLICES = Choice("sequence slices", _slices)
VOCABULARY = Choice("vocabulary parallelism", chosen("vocabulary", "output_ms"))
OFFLOAD = Choice("offloading", _offload)
MEASURED_OFFLOAD = Choice("offloading that is planned by times", _of_one_length)
SHARDS = Choice("sharded units", chosen("shard_weights"), "sharded units")
COLLECTIVES = Choice("sharded units without shard_transport=on-demand", _by_collectives)
POST_VALIDATION = Choice("post-validation", chosen("post_validation"))
EXACT = Choice(
    "exact weight gradients", lambda choices: chosen("exact")(choices) or is_value("fuse_wgrad", False)(choices)
)
FUSED = Choice("fused weight gradients", is_value("fuse_wgrad", True))
RECORDS = Choice("recorded iterations", chosen("trace", "record_costs"))
BALANCE = Choice("balanced microbatches", chosen("balance_microbatches"), "balanced microbatches")
RECORDED_COSTS = Choice("recorded costs", chosen("record_costs"))
_BY_LOOP = chosen("variable_seq_lengths", "shapes", "lengths")
UNTOLD_LENGTHS = Choice("microbatches of different lengths", _BY_LOOP)
LENGTHS = Choice("microbatches of different lengths", lambda choices: _BY_LOOP(choices) or BALANCE.shown_by(choices))
PAIRS = Choice("pairs", chosen("pairs", "overlap_experts"), "schedules that hide the all-to-all of experts")
_TO_ONE_LENGTH = "pad all microbatches to one length, or leave the other one out"
_ONE_LENGTH = "its moves are chosen by the bytes and times of one length"
_BY_SHARE = "give <offload=all>"

EXCLUSIONS = (
    Rule(BY_NAME, SCHEDULE_FILE, False, "a job runs one schedule"),
    Rule(SLICE_ENDS, OTHER_CUTS, False, "the ends define all cuts"),
    Rule(SLICES, VOCABULARY, False, "the passes of the vocabulary take whole sequences"),
    Rule(SHARDS, POST_VALIDATION, False, "a rank that undoes a step would stop between the collectives of its units"),
    Rule(SHARDS, VOCABULARY, False, "this version does not shard a rank's part of the vocabulary"),
    Rule(EXACT, FUSED, False, "fused weight gradients are rounded once less than those of stock Megatron"),
    Rule(BALANCE, SCHEDULE_FILE, False, "a file has one number of microbatches for all replicas"),
    Rule(
        BALANCE,
        PLANS,
        False,
        "its plans are for equal microbatches on all replicas",
        "give another schedule, such as zb-h1",
    ),
    Rule(
        BALANCE, COLLECTIVES, False, "replicas would wait for each other in every unit", "add the transport on demand"
    ),
    Rule(LENGTHS, SLICES, False, "sequences are cut at the same tokens in all microbatches", _TO_ONE_LENGTH),
    Rule(LENGTHS, VOCABULARY, False, "its collectives have the rows of one length", _TO_ONE_LENGTH),
    Rule(LENGTHS, MEASURED_OFFLOAD, False, _ONE_LENGTH, _BY_SHARE),
    Rule(PAIRS, PLANS, False, "its search does not order pairs", "give a schedule with pairs, such as dualpipe-v"),
    Rule(PAIRS, SLICES, False, "the all-to-alls of experts are known for whole sequences"),
    Rule(PAIRS, VOCABULARY, False, "the passes of the vocabulary would be part of pairs"),
    Rule(PAIRS, SHARDS, False, "their collectives would compete with the all-to-alls of experts"),
    Rule(PAIRS, RECORDED_COSTS, False, "the two passes of a pair have no times of their own"),
    Rule(LENGTHS, PAIRS, False, "this version pairs only microbatches of equal length"),
    Rule(UNTOLD_LENGTHS, RECORDS, False, "passes of different lengths have no common times", _TO_ONE_LENGTH),
)
"""What cannot be combined in this version."""
