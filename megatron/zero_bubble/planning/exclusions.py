"""Which choices exclude each other: one symmetric table, asked before any search and before a job starts.

A job, its dry run, ``plan``, ``compare`` and the playground ask the same rows, and so refuse in the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.plan.offload import parse_share
from megatron.zero_bubble.core.schedules import sliced
from megatron.zero_bubble.planning.decision import Spell, in_fields
from megatron.zero_bubble.planning.offload import AUTO
from megatron.zero_bubble.planning.rule import Choice, Exclusion, Shown
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
VOCABULARY = Choice("vocabulary parallelism", _vocabulary)
OFFLOAD = Choice("offloading", _offload)
MEASURED_OFFLOAD = Choice(
    "offloading that is planned by times", lambda run: [row for row in _offload(run) if row[1] == AUTO]
)
SHARDS = Choice("sharded units", _if("shard_weights", lambda setup: setup.shards), "sharded units")
COLLECTIVES = Choice(
    "sharded units without shard_transport=on-demand",
    _if("shard_weights", lambda setup: setup.shards and not setup.exchanges),
)
POST_VALIDATION = Choice("post-validation", _if("post_validation", lambda setup: setup.validates))
BALANCE = Choice(
    "balanced microbatches",
    lambda run: [] if run.balance is None else [("balance_microbatches", True)],
    "balanced microbatches",
)
RECORDED_COSTS = Choice("recorded costs", _recorded_costs)
UNTOLD_LENGTHS = Choice("microbatches of different lengths", _lengths)
LENGTHS = Choice(UNTOLD_LENGTHS.words, lambda run: [*_lengths(run), *BALANCE.shown_by(run)])
PAIRS = Choice("pairs", _pairs, "schedules that hide the all-to-all of experts")
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
    Exclusion(PAIRS, PLANS, "its search does not order pairs", "give a schedule with pairs, such as dualpipe-v"),
    Exclusion(PAIRS, SLICES, "the all-to-alls of experts are known for whole sequences"),
    Exclusion(PAIRS, VOCABULARY, "the passes of the vocabulary would be part of pairs"),
    Exclusion(PAIRS, SHARDS, "their collectives would compete with the all-to-alls of experts"),
    Exclusion(PAIRS, RECORDED_COSTS, "the two passes of a pair have no times of their own"),
    Exclusion(LENGTHS, PAIRS, "this version pairs only microbatches of equal length"),
    Exclusion(UNTOLD_LENGTHS, RECORDED_COSTS, "passes of different lengths have no common times", _TO_ONE_LENGTH),
)
"""What cannot be combined in this version."""
