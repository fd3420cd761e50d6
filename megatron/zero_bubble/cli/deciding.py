"""``--zero-bubble-schedule auto``: what a run decides before its model is built.

Placement, stages per rank, layers per stage, slices and the division of the vocabulary cannot change during a run. They
are decided by ``zero-bubble advise`` from the flags of the job: by the costs that its last run has left next to its
checkpoints, else by estimates. Every rank gets the same answer: the advice is a function of the flags, the kind of GPU,
the environment, and files that all ranks read, and its searches end after a number of passes, never after a time. The
decision is kept in the folder of ``--save``, with the facts that it follows from: a job with other facts decides again.
The order of passes is then that of ``zb-auto``, which measures them, within the memory that is left.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from megatron.zero_bubble import __version__
from megatron.zero_bubble.cli.advice_text import words_of
from megatron.zero_bubble.cli.advise import Advised, advised, changed, defaults
from megatron.zero_bubble.cli.beside_checkpoints import (
    COSTS,
    DECISION,
    Costs,
    KeptDecision,
    costs_in,
    read_decision,
    unused,
    write_decision,
)
from megatron.zero_bubble.cli.job_figures import CostsInput
from megatron.zero_bubble.cli.job_runs import check_job, job_runs
from megatron.zero_bubble.cli.machine import Gpu, gpu_here
from megatron.zero_bubble.cli.megatron_job import checked_megatron_job
from megatron.zero_bubble.core.errors import Refusal, UserError, attempted, explaining
from megatron.zero_bubble.core.formats.facts import Facts, all_differences, listed
from megatron.zero_bubble.core.search.placements import HAS_CHUNKS, name_of
from megatron.zero_bubble.planning.change import ROUNDED, AdviceRow
from megatron.zero_bubble.planning.codecs import Difference, flag_of, parse
from megatron.zero_bubble.planning.decisions import DECISIONS
from megatron.zero_bubble.planning.idle import idle_of
from megatron.zero_bubble.planning.job.arguments.tokenizer import known_vocab_size
from megatron.zero_bubble.planning.job.facts import facts_of, job_facts
from megatron.zero_bubble.planning.job.flags import as_given, given_in, retired
from megatron.zero_bubble.planning.setup import AUTO_LIMIT, Given, Named, Searched, Setup

AUTO = "auto"
_SCHEDULE = "--zero-bubble-schedule"
_RECORD = "--zero-bubble-record-costs"
_EFFORT = 0.03
"""Effort of the searches that decide, because the run plans again from measured passes."""
_ASIDE = (
    "schedule",
    "exact",
    "fuse_wgrad",
    "memory_limit",
    "device",
    "trace",
    "trace_iterations",
    "record_costs",
    "log_bubble",
)
"""Options of this package that are facts of their own, or change nothing in what is decided."""


def decided(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> tuple[list[str], list[str]]:
    """Replace ``--zero-bubble-schedule auto`` by what it decides.

    Args:
        argv: the flags of a job.
        environment: with ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE`` and ``RANK``, as torchrun sets them.

    Returns:
        the flags to run with, unchanged without ``auto``; and log lines, also for flags that others have replaced.

    Raises:
        UserError: a flag that contradicts it, or a job that could not run.
    """
    if not {f"{_SCHEDULE}={AUTO}", AUTO} & set(argv):  # other flags of the job are not even parsed
        return list(argv), retired(argv)
    given, others = given_in(argv)
    if given.get("schedule") != AUTO:
        return list(argv), retired(argv)
    for row in DECISIONS:
        if row.by_auto and (value := given.get(row.name)) is not None:
            raise UserError(
                f"{_SCHEDULE} {AUTO} decides what {flag_of(row.name)} does; got {as_given(row.name, value)}; leave it "
                "out, or name a schedule"
            )
    left, saved, loaded = _without_schedule(argv), _folder(others, "--save"), _folder(others, "--load")
    gpu = Gpu() if given.get("device") == "cpu" else gpu_here()
    facts = _facts(others, given, gpu, environment)
    costs, remarks = costs_in([saved, loaded], facts)
    facts = {**facts, "costs": "estimated" if costs is None else costs.digest}
    job = _Undecided(parse(others), left, gpu, environment)
    found, why, more = _kept([saved, loaded], facts, job)
    remarks += more
    if found is None:
        asked, more = _advice(others, costs, given.get("memory_limit"), gpu, environment)
        remarks += more
        found, why = _decision(asked, given, job, facts)
    if saved is not None and environment.get("RANK", "0") == "0":
        remarks += write_decision(saved / DECISION, found)
    is_recorded = costs is not None and saved is not None and costs.file == saved / COSTS and costs.names_its_job
    flags, lines = _adopted(job, found, why, None if is_recorded else saved)
    return flags, [*retired(argv), *(f"{AUTO}: {remark}" for remark in remarks), *lines]


def decided_for_our_loop(argv: Sequence[str]) -> list[str]:
    """Do the same for ``scripts/pretrain_gpt.py``, whose flags may be in a configuration file.

    An error in the flags ends the process with a sentence, on rank 0 of every node.
    """
    from megatron.zero_bubble.planning.job.arguments.parser import expanded

    try:
        flags, lines = decided(expanded(argv))
    except UserError as error:
        if not {f"{_SCHEDULE}={AUTO}", AUTO} & set(argv):
            return list(argv)  # the loop itself reports it
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from error
    if os.environ.get("RANK", "0") == "0":
        print("".join(f"zero-bubble: {line}\n" for line in lines), end="", flush=True)
    return flags if lines else list(argv)


class _Undecided(NamedTuple):
    """A job whose schedule is left to a decision.

    Attributes:
        setup: what it runs without the flags of this package.
        flags: its flags but for the schedule.
        environment: of its processes.
    """

    setup: Setup
    flags: list[str]
    gpu: Gpu
    environment: Mapping[str, str]

    def words(self, decision: KeptDecision) -> Difference:
        """The flags that a decision adds and leaves out."""
        return words_of(decision.setup, decision.adds, decision.drops, self.setup, self.flags)

    def refused(self, decision: KeptDecision) -> str | None:
        """Why it would not start with a decision, or, on its GPU, could not run what it begins with."""
        return _refused(changed(self.flags, *self.words(decision)), self.gpu, self.environment)


def _adopted(job: _Undecided, decision: KeptDecision, why: str, folder: Path | None) -> tuple[list[str], list[str]]:
    """The flags with a decision, and what is logged. A search records what it measures, if there is a folder for it."""
    words = job.words(decision)
    flags = changed(job.flags, *words)
    what = " ".join(words.add) if words.add else "the job's own schedule"
    lines = [f"{AUTO}: {what}: {why}"]
    records = any(word.startswith(_RECORD) for word in job.flags)
    if isinstance(decision.setup.order, Searched) and folder is not None and not records:
        recording = [*flags, _RECORD, str(folder / COSTS)]
        if _refused(recording, None, job.environment) is None:
            return recording, [*lines, f"{AUTO}: {folder / COSTS} will have the measured costs when the run ends"]
    return flags, lines


def _kept(folders: Sequence[Path | None], facts: Facts, job: _Undecided) -> tuple[KeptDecision | None, str, list[str]]:
    """The first decision in these folders that is one for this job, where it is from, and remarks on others.

    Raises:
        UserError: a file has no decision.
    """
    remarks = []
    for file in (folder / DECISION for folder in dict.fromkeys(folders) if folder is not None):
        if not file.exists():
            continue
        found = read_decision(file)
        if not found.facts:
            remarks.append(f"{file} does not say for which job it decided, so this is decided again")
        elif different := all_differences(found.facts, facts):
            remarks.append(f"{file} decided for another job ({listed(different)}), so this is decided again")
        elif (reason := job.refused(found)) is not None:
            remarks.append(f"{file} decided for what this job refuses, so this is decided again: {reason}")
        else:
            return found, f"as {file} says; remove it to decide again", remarks
    return None, "", remarks


def _facts(
    others: Sequence[str], given: Mapping[str, Any], gpu: Gpu, environment: Mapping[str, str]
) -> dict[str, str | int | bool]:
    """What a decision follows from, but for the costs.

    Args:
        others: the flags of the job that are not of this package.
        given: the values of the flags of this package.

    Raises:
        UserError: a job that could not run without this package.
    """
    ours = {name: value for name, value in given.items() if name not in _ASIDE}
    with explaining(f"{_SCHEDULE} {AUTO} could not decide: "):
        args = checked_megatron_job(others, *_sizes(environment)).args
        name = "cpu" if given.get("device") == "cpu" else gpu.name
        of_job = {**facts_of(args, name, known_vocab_size(args)), **job_facts(args)}
    return {
        **of_job,
        "gpus_per_node": _sizes(environment)[1],
        "gpu_memory": gpu.memory or "unknown",
        "exact": _is_exact(given),
        "memory_limit": given.get("memory_limit") or AUTO_LIMIT,
        "options": ", ".join(f"{name} {value}" for name, value in ours.items()),
        "version": __version__,
    }


def _is_exact(given: Mapping[str, Any]) -> bool:
    """Whether sums must have the bits of stock; ``--no-zero-bubble-fuse-wgrad`` is the older name."""
    return bool(given.get("exact")) or given.get("fuse_wgrad") is False


def _decision(
    asked: Advised, given: Mapping[str, Any], undecided: _Undecided, facts: Facts
) -> tuple[KeptDecision, str]:
    """What to run, by the advice, and why: the advised change, else the fastest that the job's other flags allow.

    Args:
        asked: the advice.
        given: the values of the flags of this package.
    """
    job, advice = asked.job, asked.advice
    timeline, costs, _ = job.today
    idle = idle_of(timeline, costs.on(timeline.schedule.placement)[0]).total / timeline.makespan_ms
    best = [] if advice.best is None else [advice.best]
    rows = best + [row for row in advice.rows if row not in best and row.gain >= advice.worth]
    for row in rows:
        if _is_exact(given) and row.change.numbers == ROUNDED:
            continue
        for setup in _ways(row, given.get("memory_limit")):
            decision = KeptDecision(setup, row.change.adds, row.change.drops, facts)
            if undecided.refused(decision) is None:
                why = f"{row.change.name}, {-row.gain:+.1%} of the time of the passes expected, of which ranks idle "
                return decision, f"{why}{idle:.1%} without it"
    # Other flags of this package need one of its schedules.
    by_us = not set(given) <= {"schedule", "device"}
    own = replace(undecided.setup, order=Named(timeline.schedule.name)) if by_us else undecided.setup
    return KeptDecision(own, (), (), facts), f"ranks idle {idle:.1%} of the time, and no change is worth it"


def _ways(row: AdviceRow, limit: str | None) -> Iterator[Setup]:
    """The setup of a row with the order of passes that is planned during the run, where it can be, then as it is. Pairs
    and sharded units have an order of their own; what runs only from a file, which a job does not have, is left out.
    """
    if isinstance(row.setup.order, Given):
        return
    setup, on = row.setup, row.change.placement
    name = name_of(on)
    has_own_order = row.plan.schedule.overlaps or row.change.question.has_units
    if setup.order is not None and name is not None and not has_own_order:
        stages = on.num_stages // on.num_ranks if name in HAS_CHUNKS else None
        order = Searched(name, stages, limit or AUTO_LIMIT, keep_faster=True)
        yield replace(setup, order=order)
    yield setup


def _refused(argv: Sequence[str], gpu: Gpu | None, environment: Mapping[str, str]) -> str | None:
    """Why a job with these flags would not start, or, on this GPU, could not run what it begins with."""
    started = attempted(partial(_check, argv, gpu, environment))
    return started.reason if isinstance(started, Refusal) else None


def _check(argv: Sequence[str], gpu: Gpu | None, environment: Mapping[str, str]) -> None:
    args = checked_megatron_job(argv, *_sizes(environment)).args
    if gpu is not None and args.run.has_schedule:
        check_job(args, job_runs(args, gpu.estimated, True, environment))


def _sizes(environment: Mapping[str, str]) -> tuple[int, int]:
    """The numbers of all ranks and of those on a node."""
    world = int(environment.get("WORLD_SIZE", "1"))
    return world, int(environment.get("LOCAL_WORLD_SIZE", str(world)))


def _advice(
    others: Sequence[str],
    costs: Costs | None,
    limit: str | None,
    gpu: Gpu,
    environment: Mapping[str, str],
) -> tuple[Advised, list[str]]:
    """Ask what ``zero-bubble advise`` answers.

    Args:
        others: the flags of the job that are not of this package.
        limit: the memory limit that its flags give, if any.

    Returns:
        the advice, and remarks on the costs.

    Raises:
        UserError: its error.
    """
    world, node = _sizes(environment)
    asked = {
        "nodes": max(1, world // node),
        "gpus_per_node": node,
        "gpu": gpu.estimated,
        "gpu_memory": gpu.memory,
        "memory_limit": None if limit == AUTO_LIMIT else limit,
        # Rows are checked by ``_refused``, with the schedules that the run begins with; it plans their order itself.
        "effort": _EFFORT,
        "environment": environment,
        "tries": False,
        "drops_overlaps": False,
        "files": False,
    }

    def ask(file: Path | None) -> Advised:
        measured = None if file is None else CostsInput(str(file))
        return advised(argparse.Namespace(**{**vars(defaults()), **asked, "costs": measured}), others)

    remarks: list[str] = []
    with explaining(f"{_SCHEDULE} {AUTO} could not decide: "):
        if costs is not None:
            found = attempted(partial(ask, costs.file))
            if not isinstance(found, Refusal):
                said = f"{costs.file} does not say of which job it is, and is taken as of this one"
                return found, [] if costs.names_its_job else [said]
            remarks.append(unused(costs.file, found.reason))
        return ask(None), remarks


def _folder(others: Sequence[str], flag: str) -> Path | None:
    """The folder that a flag of the job names, if it has it."""
    found = None
    for word, value in zip(others, [*others[1:], ""], strict=True):
        name, equals, own = word.partition("=")
        if name == flag:
            found = Path(own if equals else value)
    return found


def _without_schedule(argv: Sequence[str]) -> list[str]:
    left = list(argv)
    for place, word in enumerate(left):
        if word == _SCHEDULE:
            return [*left[:place], *left[place + 2 :]]
        if word == f"{_SCHEDULE}={AUTO}":
            return [*left[:place], *left[place + 1 :]]
    return left
