"""``--zero-bubble-schedule auto``: what a run decides before its model is built.

Placement, stages per rank and the memory limit cannot change during a run. They are decided by ``zero-bubble advise
--quick`` from the flags of the job: by the costs that its last run has left next to its checkpoints, else by estimates.
Every rank gets the same answer, because it depends only on the flags and on files that all ranks read. The order of
passes is then that of ``zb-auto``, which measures them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.zero_bubble.cli.advise import add_advise, advise
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.job.flags import StrictParser, parse_ours
from megatron.zero_bubble.planning.source import ZB_AUTO

AUTO = "auto"
COSTS, DECISION = "zero_bubble_costs.json", "zero_bubble_auto.json"
"""The files next to the checkpoints: what a run has measured, and what it decided."""
_SCHEDULE, _PAIRS = "--zero-bubble-schedule", "--zero-bubble-overlap-experts"
_DECIDED = (
    "schedule_file",
    "placement",
    "num_chunks",
    "memory_limit",
    "num_slices",
    "slice_ends",
    "vocabulary_parallel",
    "shard_weights",
    "overlap_experts",
)
"""Flags that contradict ``auto``, because it decides what they do."""
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
        return _adopted(left, _read(file), f"as {file} says; remove it to decide again")
    asked = _advice(others, folder, options.zero_bubble_device == "cpu", environment)
    ours = [word for word in left if word.startswith(("--zero-bubble-", "--no-zero-bubble-"))]
    decision, why = _decision(asked, any(not word.startswith("--zero-bubble-device") for word in ours))
    if file is not None and environment.get("RANK", "0") == "0":
        _write(file, decision)
    return _adopted(left, decision, why)


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


def _adopted(argv: list[str], decision: Mapping[str, Any], why: str) -> tuple[list[str], list[str]]:
    """The flags with a decision, and what is logged."""
    out = set(decision["leave_out"])
    left, is_dropped = [], False
    for word in argv:
        if word.startswith("--"):
            is_dropped = word.partition("=")[0] in out
        if not is_dropped:
            left.append(word)
    flags = decision["flags"]
    what = " ".join(flags) if flags else "the job's own schedule"
    return [*left, *flags], [f"{AUTO}: {what}: {why}"]


def _decision(asked: Mapping[str, Any], by_us: bool) -> tuple[dict[str, Any], str]:
    """What to run, by the advice, and why.

    Args:
        by_us: whether this package runs the job's own schedule if that is best, since the job has other flags of it.
    """
    job = asked["job"]
    idle = sum(job["idle"].values())
    if not asked["worth_it"]:
        flags = [_SCHEDULE, job["schedule"]] if by_us else []
        return {"flags": flags, "leave_out": []}, f"ranks idle {idle:.1%} of the time, and no change is worth it"
    row = asked["advice"][asked["best"] - 1]
    why = f"{-row['gain']:+.1%} of the time of the passes expected, of which ranks idle {idle:.1%} without it"
    if _SCHEDULE not in row["flags"]:
        return {"flags": row["flags"], "leave_out": row["leave_out"]}, f"{why}; without this package"
    if _PAIRS in row["flags"]:  # which zb-auto does not order
        return {"flags": row["flags"], "leave_out": row["leave_out"]}, why
    chunks = ["--zero-bubble-num-chunks", str(row["num_chunks"])] if row["placement"] in ("loop", "wave") else []
    flags = [_SCHEDULE, ZB_AUTO, "--zero-bubble-placement", row["placement"], *chunks]
    flags += ["--zero-bubble-memory-limit", row["activation_limit"], "--zero-bubble-keep-faster"]
    return {"flags": flags, "leave_out": row["leave_out"]}, f"{why}; best by name: {row['name']}"


def _advice(
    others: Sequence[str], folder: Path | None, on_cpu: bool, environment: Mapping[str, str]
) -> Mapping[str, Any]:
    """Ask ``zero-bubble advise``.

    Raises:
        UserError: its error.
    """
    world = int(environment.get("WORLD_SIZE", "1"))
    node = int(environment.get("LOCAL_WORLD_SIZE", str(world)))
    costs = None if folder is None else folder / COSTS
    given = ["--quick", "--format", "json", "--nodes", str(max(1, world // node)), "--gpus-per-node", str(node)]
    given += [] if on_cpu else _gpu()
    given += ["--costs", str(costs)] if costs is not None and costs.exists() else []
    parser = StrictParser()
    add_advise(parser)
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


def _folder(others: Sequence[str]) -> Path | None:
    """Where the job loads its checkpoints from, else where it saves them; None for neither."""
    found: dict[str, str] = {}
    for flag, value in zip(others, [*others[1:], ""], strict=True):
        name, _, own = flag.partition("=")
        if name in ("--load", "--save"):
            found[name] = own or value
    text = next((found[name] for name in ("--load", "--save") if name in found), None)
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
