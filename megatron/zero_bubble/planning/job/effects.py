"""Where each option of a job has an effect: everywhere else it is refused, so that no typo or leftover goes unnoticed.

The rows are checked on the options as they are given, by the names of decisions: flags, or fields of
``ZeroBubbleConfig``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.schedules import ZB_AUTO, has_units
from megatron.zero_bubble.core.search.placements import HAS_CHUNKS
from megatron.zero_bubble.planning.decision import Spell
from megatron.zero_bubble.planning.exclusions import (
    BALANCE,
    PLANS,
    REFINED,
    SCHEDULE_FILE,
)
from megatron.zero_bubble.planning.rule import Choice, remedy_of
from megatron.zero_bubble.planning.run_options import RunOptions
from megatron.zero_bubble.planning.setup import Named, Searched, Setup


@dataclass(frozen=True)
class Job:
    """The properties of a job that decide whether an option has an effect; by default, none is known.

    Attributes:
        under_launcher: whether Megatron-LM's own training loop runs.
        shows_stock_passes: whether the passes of Megatron's own 1F1B can be observed if no schedule is selected.
        train_iters: the last iteration of the run; None if it is not known yet.
    """

    run: RunOptions
    under_launcher: bool = False
    shows_stock_passes: bool = True
    train_iters: int | None = None


class Need(NamedTuple):
    """What an option has an effect with.

    Attributes:
        words: its name in a sentence.
    """

    words: str
    is_met: Callable[[Job], object]


class Effect(NamedTuple):
    """What an option needs to have an effect.

    Attributes:
        name: of the decision.
        why: the sentence after the words of what it needs, in which ``{schedule}`` and ``{last}``, the last iteration,
            stand for values.
        instead: what the user can do, as in ``remedy_of``.
    """

    name: str
    needs: Need
    why: str
    instead: str

    def sentence(self, given: Mapping[str, Any], job: Job, spell: Spell) -> str:
        """The refusal; "" if the option is not given, or has an effect."""
        if given.get(self.name) is None or self.needs.is_met(job):
            return ""
        why = self.why.format(schedule=job.run.setup.name, last=job.train_iters)
        return f"{spell(self.name, given[self.name])} works only with {self.needs.words}{why}; {self.remedy(spell)}"

    def remedy(self, spell: Spell) -> str:
        """What the user can do."""
        return remedy_of(f"leave it out, or {self.instead}", spell)


def check_effects(given: Mapping[str, Any], job: Job, spell: Spell) -> None:
    """Reject options that have no effect.

    Args:
        given: the options that are given, by the names of decisions, also those with their defaults.
        spell: writes one as the user gave it.

    Raises:
        UserError: the rule, the given value and the remedy.
    """
    if (refusal := next(filter(None, (row.sentence(given, job, spell) for row in EFFECTS)), None)) is not None:
        raise UserError(refusal)


def _if(words: str, holds: Callable[[Setup], object]) -> Need:
    return Need(words, lambda job: holds(job.run.setup))


def _made(*choices: Choice) -> Need:
    return Need(choices[0].words, lambda job: any(choice.is_made(job.run) for choice in choices))


def _either(words: str, *needs: Need) -> Need:
    return Need(words, lambda job: any(need.is_met(job) for need in needs))


def _chooses_units(setup: Setup) -> bool:
    return has_units(setup.name) and not setup.unit


def _in_the_run(job: Job) -> bool:
    first = min((some[0] for some in job.run.observations.trace_iterations or ()), default=0)
    return job.train_iters is None or first <= job.train_iters


SCHEDULE = _if("a zero-bubble schedule", lambda setup: setup.order is not None)
_FILE = _made(SCHEDULE_FILE)
_PLANS = _made(PLANS)
_BY_NAME = _if("interleaved schedules by name", lambda setup: isinstance(setup.order, Named))
_HAS_CHUNKS = _if(
    f"{ZB_AUTO} on a loop or in a wave",
    lambda setup: isinstance(setup.order, Searched) and setup.order.placement in HAS_CHUNKS,
)
_CUT = _if(f"a schedule of slices or {ZB_AUTO}", lambda setup: setup.can_cut)
_HAS_UNITS = _if("zero-pp or sharded units", lambda setup: setup.has_units)
_RECOMPUTING = _if("a plan with R", lambda setup: setup.plan is not None and setup.plan.schedule.recomputed)
_CHOSEN_UNITS = _if("zero-pp without unit_microbatches", _chooses_units)
_OWN_LOOP = Need("scripts/pretrain_gpt.py", lambda job: not job.under_launcher)
_OBSERVED = Need(
    "a zero-bubble schedule, or on 2 or more pipeline ranks with one stage each",
    lambda job: job.run.has_schedule or job.shows_stock_passes,
)
_RECORDED = Need("--zero-bubble-trace or --zero-bubble-record-costs", lambda job: job.run.observations.records)
_KNOWN_ORDER = _if("a schedule by name or from a file", lambda setup: not isinstance(setup.order, Searched))
_RUN = Need("iterations of the run", _in_the_run)
_ZB_H1 = "give --zero-bubble-schedule zb-h1"
_SEQ_ZB_H1 = "give <schedule=seq-zb-h1>"


def _rows(names: str, needs: Need, why: str, instead: str) -> list[Effect]:
    return [Effect(name, needs, why, instead) for name in names.split()]


EFFECTS = (
    *_rows(
        "post_validation",
        SCHEDULE,
        ", whose passes validate the optimizer step; got none",
        "give --zero-bubble-schedule zb-h2",
    ),
    *_rows(
        "exact fuse_wgrad post_receives nccl_ctas offload host_memory shard_weights balance_microbatches",
        SCHEDULE,
        "; got none",
        _ZB_H1,
    ),
    *_rows(
        "balance_microbatches",
        _OWN_LOOP,
        ", because Megatron-LM pads or packs every sample to --seq-length, and counts one number of microbatches for "
        "all replicas",
        "train with scripts/pretrain_gpt.py",
    ),
    *(Effect(name, _made(choice), why, choice.how) for choice in REFINED for name, why in choice.refined_by),
    *_rows("unit_microbatches", _HAS_UNITS, "; got {schedule}", "give <schedule=zero-pp>"),
    *_rows("num_slices slice_ends", _either(_CUT.words, _CUT, _FILE), "; got {schedule}", _SEQ_ZB_H1),
    *_rows("attention_share", _either(_CUT.words, _CUT, _made(BALANCE)), "; got {schedule}", _SEQ_ZB_H1),
    *_rows(
        "num_chunks",
        _either(f"{_BY_NAME.words}, or {_HAS_CHUNKS.words}", _BY_NAME, _HAS_CHUNKS, _FILE),
        "; got {schedule}",
        "name a schedule or placement",
    ),
    *_rows("early_recompute", SCHEDULE, ", into which its passes are inserted; got none", _ZB_H1),
    *_rows(
        "early_recompute",
        _either("a schedule by name, zb-auto or a plan with R", _BY_NAME, _PLANS, _RECOMPUTING),
        "; got {schedule}",
        "plan again with `zero-bubble plan --early-recompute`",
    ),
    *_rows("vocabulary", SCHEDULE, ", into which its passes are inserted; got none", _ZB_H1),
    *_rows(
        "placement",
        _made(PLANS, SCHEDULE_FILE),
        ", because every other schedule defines its placement; got {schedule}",
        "choose zb-auto",
    ),
    *_rows(
        "memory_limit",
        _either(f"{ZB_AUTO}, or {_CHOSEN_UNITS.words}", _PLANS, _CHOSEN_UNITS),
        ", because every other schedule has a fixed peak; got {schedule}",
        "choose one of the two",
    ),
    *_rows(
        "overlap_experts",
        _KNOWN_ORDER,
        ", because a run of {schedule} measures passes that run alone",
        "give the file that zero-bubble plan --schedule zb-auto --pairs --format json writes",
    ),
    *_rows("keep_faster", _PLANS, ", which changes schedules during the run; got {schedule}", "choose zb-auto"),
    *_rows("costs_file", _CHOSEN_UNITS, ", whose units it chooses; got {schedule}", "choose zero-pp"),
    *_rows(
        "trace log_bubble",
        _either(SCHEDULE.words, SCHEDULE, _OWN_LOOP),
        " to measure; got none",
        "give --zero-bubble-schedule 1f1b, which has the order of stock Megatron",
    ),
    *_rows("record_costs", SCHEDULE, " that splits every backward into B and W; got none", _ZB_H1),
    *_rows(
        "trace log_bubble",
        _OBSERVED,
        ", because passes of stock Megatron can be observed only then",
        "change the pipeline",
    ),
    *_rows("trace_iterations", _RECORDED, ", whose iterations it selects", "give --zero-bubble-trace DIR"),
    *_rows(
        "trace_iterations",
        _RUN,
        ", which begins with 1 and ends with {last}",
        "list earlier ones, or raise --train-iters",
    ),
)
"""One rule per option: what it has an effect with, in the order in which they are checked."""
