"""``--zero-bubble-schedule auto``: what a run decides before its model is built.

Placement, stages per rank, layers per stage, slices and the division of the vocabulary cannot change during a run. They
are decided by ``zero-bubble advise`` from the flags of the job: by the costs that its last run has left next to its
checkpoints, else by estimates. Every rank gets the same answer, because it depends only on the flags and on files that
all ranks read. The order of passes is then that of ``zb-auto``, which measures them, within the memory that is left.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.zero_bubble.cli.advise import add_advise, advise, changed
from megatron.zero_bubble.cli.megatron_job import checked_megatron_job
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.job.flags import StrictParser, parse_ours
from megatron.zero_bubble.planning.advice import NUMBERS, ROUNDED
from megatron.zero_bubble.planning.source import AUTO_LIMIT, ZB_AUTO
from megatron.zero_bubble.search.placements import HAS_CHUNKS

AUTO = "auto"
COSTS, DECISION = "zero_bubble_costs.json", "zero_bubble_auto.json"
"""The files next to the checkpoints: what a run has measured, and what it decided."""
_SCHEDULE = "--zero-bubble-schedule"
_ORDERED = ("--zero-bubble-overlap-experts", "--zero-bubble-shard-weights")
"""Flags of pairs and of sharded units, which have an order of their own."""
_RECORD = "--zero-bubble-record-costs"
_DECIDED = (
    "schedule_file",
    "placement",
    "num_chunks",
    "num_slices",
    "slice_ends",
    "vocabulary_parallel",
    "shard_weights",
    "overlap_experts",
)
"""Flags that contradict ``auto``, because it decides what they do."""
_EFFORT = 0.03
"""Effort of the searches that decide, because the run plans again from measured passes."""
_GPUS = {"A100": "a100", "H100": "h100", "H200": "h200", "B200": "b200"}


def decided(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> tuple[list[str], list[str]]:
    """Replace ``--zero-bubble-schedule auto`` by what it decides.

    Args:
        argv: the flags of a job.
        environment: with ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE`` and ``RANK``, as torchrun sets them.

    Returns:
        the flags to run with, and log lines; both unchanged and empty without ``auto``.

    Raises:
        UserError: a flag that contradicts it, or a job that could not run.
    """
    if not {f"{_SCHEDULE}={AUTO}", AUTO} & set(argv):  # other flags of the job are not even parsed
        return list(argv), []
    options, others = parse_ours(argv)
    if options.zero_bubble_schedule != AUTO:
        return list(argv), []
    for name in _DECIDED:
        if (value := getattr(options, f"zero_bubble_{name}")) is not None:
            flag = f"--zero-bubble-{name.replace('_', '-')}"
            raise UserError(
                f"{_SCHEDULE} {AUTO} decides what {flag} does; got {flag} {value}; leave it out, or name a schedule"
            )
    folder = _folder(others)
    file = None if folder is None else folder / DECISION
    left = _without_schedule(argv)
    if file is not None and file.exists():
        return _adopted(left, _read(file), f"as {file} says; remove it to decide again", environment)
    asked = _advice(others, folder, options, environment)
    decision, why = _decision(asked, left, options, environment)
    if file is not None and environment.get("RANK", "0") == "0":
        _write(file, decision)
    return _adopted(left, decision, why, environment)


def decided_for_our_loop(argv: Sequence[str]) -> list[str]:
    """Do the same for ``scripts/pretrain_gpt.py``, whose flags may be in a configuration file.

    An error in the flags ends the process with a sentence, on rank 0 of every node.
    """
    from megatron.zero_bubble.training.arguments import expanded

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


def _adopted(
    argv: list[str], decision: Mapping[str, Any], why: str, environment: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """The flags with a decision, and what is logged. A search records what it measures, for the next decision."""
    flags = changed(argv, decision["flags"], decision["leave_out"])
    what = " ".join(decision["flags"]) if decision["flags"] else "the job's own schedule"
    folder, lines = _folder(argv, ("--save",)), [f"{AUTO}: {what}: {why}"]
    if ZB_AUTO in decision["flags"] and folder is not None and not any(word.startswith(_RECORD) for word in argv):
        recording = [*flags, _RECORD, str(folder / COSTS)]
        if _refused(recording, environment) is None:
            return recording, [*lines, f"{AUTO}: {folder / COSTS} will have the measured costs when the run ends"]
    return flags, lines


def _decision(
    asked: Mapping[str, Any], left: list[str], options: argparse.Namespace, environment: Mapping[str, str]
) -> tuple[dict[str, Any], str]:
    """What to run, by the advice, and why: the advised change, else the fastest that the job's other flags allow.

    Args:
        asked: what ``zero-bubble advise --format json`` prints.
        left: the flags of the job without a schedule.
        options: those of this package.
    """
    job = asked["job"]
    idle = sum(job["idle"].values())
    rows = [asked["advice"][asked["best"] - 1]] if asked["worth_it"] else []
    rows += [row for row in asked["advice"] if row not in rows and row["gain"] >= asked["worth"]]
    for row in rows:
        if options.zero_bubble_exact and row["bits"] == NUMBERS[ROUNDED]:
            continue
        for flags in _ways(row, options.zero_bubble_memory_limit):
            if _refused(changed(left, flags, row["leave_out"]), environment) is None:
                why = f"{row['name']}, {-row['gain']:+.1%} of the time of the passes expected, of which ranks idle "
                return {"flags": flags, "leave_out": row["leave_out"]}, f"{why}{idle:.1%} without it"
    # Other flags of this package need one of its schedules.
    ours = [word for word in left if word.startswith(("--zero-bubble-", "--no-zero-bubble-"))]
    by_us = any(not word.startswith("--zero-bubble-device") for word in ours)
    own = [_SCHEDULE, job["schedule"]] if by_us else []
    return {"flags": own, "leave_out": []}, f"ranks idle {idle:.1%} of the time, and no change is worth it"


def _ways(row: Mapping[str, Any], limit: str | None) -> Iterator[list[str]]:
    """The flags to run a row with: those with which the order of passes is planned during the run, then its own."""
    own = list(row["flags"])
    searched = ["--zero-bubble-memory-limit", limit or AUTO_LIMIT, "--zero-bubble-keep-faster"]
    if ZB_AUTO in own:
        yield changed(own, searched, ("--zero-bubble-memory-limit",))
    elif _SCHEDULE in own and not {*_ORDERED} & {*own}:
        chunks = ["--zero-bubble-num-chunks", str(row["num_chunks"])] if row["placement"] in HAS_CHUNKS else []
        on = [_SCHEDULE, ZB_AUTO, "--zero-bubble-placement", row["placement"], *chunks]
        yield changed(own, [*on, *searched], ())
    yield own


def _refused(argv: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Why a job with these flags would not start."""
    try:
        checked_megatron_job(argv, *_sizes(environment))
    except UserError as error:
        return str(error)
    return None


def _sizes(environment: Mapping[str, str]) -> tuple[int, int]:
    """The numbers of all ranks and of those on a node."""
    world = int(environment.get("WORLD_SIZE", "1"))
    return world, int(environment.get("LOCAL_WORLD_SIZE", str(world)))


def _advice(
    others: Sequence[str], folder: Path | None, options: argparse.Namespace, environment: Mapping[str, str]
) -> Mapping[str, Any]:
    """Ask ``zero-bubble advise``, without a limit of time, which would depend on the machine.

    Args:
        others: the flags of the job that are not of this package.
        folder: where costs may be.
        options: the flags of this package.

    Raises:
        UserError: its error.
    """
    world, node = _sizes(environment)
    costs = None if folder is None else folder / COSTS
    given = ["--format", "json", "--nodes", str(max(1, world // node)), "--gpus-per-node", str(node)]
    given += [] if options.zero_bubble_device == "cpu" else _gpu()
    given += ["--costs", str(costs)] if costs is not None and costs.exists() else []
    limit = options.zero_bubble_memory_limit
    given += ["--memory-limit", limit] if limit not in (None, AUTO_LIMIT) else []
    parser = StrictParser()
    add_advise(parser)
    parser.set_defaults(seconds=math.inf, effort=_EFFORT)
    try:
        found: Mapping[str, Any] = json.loads(advise(parser.parse_args([*given, "--", *others])))
    except UserError as error:
        raise UserError(f"{_SCHEDULE} {AUTO} could not decide: {error}") from error
    return found


def _gpu() -> list[str]:
    """The flags for the GPU of this machine, by the driver; none without one, so that another is assumed."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    name, _, mebibytes = text.splitlines()[0].rpartition(",")
    known = next((own for part, own in _GPUS.items() if part in name), None)
    return [*(["--gpu", known] if known else []), "--gpu-memory", f"{int(mebibytes) / 1024:.1f}GiB"]


def _folder(others: Sequence[str], flags: Sequence[str] = ("--load", "--save")) -> Path | None:
    """The folder of the first of these flags that the job has: where it loads its checkpoints from, else saves them."""
    found: dict[str, str] = {}
    for flag, value in zip(others, [*others[1:], ""], strict=True):
        name, _, own = flag.partition("=")
        if name in flags:
            found[name] = own or value
    text = next((found[name] for name in flags if name in found), None)
    return None if text is None else Path(text)


def _without_schedule(argv: Sequence[str]) -> list[str]:
    left = list(argv)
    for place, word in enumerate(left):
        if word == _SCHEDULE:
            return [*left[:place], *left[place + 2 :]]
        if word == f"{_SCHEDULE}={AUTO}":
            return [*left[:place], *left[place + 1 :]]
    return left


def _read(file: Path) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return {name: [str(flag) for flag in found[name]] for name in ("flags", "leave_out")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is not a decision of {_SCHEDULE} {AUTO}: {error}; remove it") from error


def _write(file: Path, decision: Mapping[str, Any]) -> None:
    """Write the decision at once, because other ranks may read it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(".draft")
        draft.write_text(json.dumps(decision, indent=1) + "\n", encoding="utf-8")
        draft.replace(file)
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}; make its folder writable") from error
