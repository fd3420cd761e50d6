"""Run one part: each step in a separate process with its time limit, then one JSON file and a table.

A step that fails, hangs or writes no figures costs the other steps nothing. The exit status is the number of steps that
failed.

    bash scripts/gpu_day.sh PART [--cpu] [--steps TEXT ...] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from bench import ranks
from gpu_day import install, mps, shared_nccl
from gpu_day.steps import NEEDS_GPU, OK, PART_LIMIT_S, PARTS, SKIPPED, Part, Step

RESULTS = "gpu_day.json"
LAST_LINES = 40
"""Number of lines of a failed step's log that the JSON file has."""
_GRACE_S = 5.0
_MARK = "ZB_GPU_DAY_STEP"
_PATIENCE_ON_CPU = 3
"""Factor of the limits with --cpu: the machine may run other programs as well."""
_ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Defaults; a machine without a network may have no interface but the loopback."""


def main() -> int:
    """Run the part; return the number of failed steps."""
    parser = argparse.ArgumentParser(
        prog="gpu_day.sh",
        description=__doc__.splitlines()[0] if __doc__ else None,
        epilog="\n".join(["parts:", *(f"  {name:20}{part.title}" for name, part in PARTS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", choices=PARTS, metavar="PART")
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on the CPU, to see that the steps run")
    parser.add_argument(
        "--steps", nargs="+", metavar="TEXT", help="only steps whose names contain one of these; other results stay"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/gpu_day"), help="folder of the results")
    options = parser.parse_args()
    folder = options.folder.resolve()
    part = chosen(PARTS[options.part], options.steps)
    if not part.steps:
        names = ", ".join(step.name for step in PARTS[options.part].steps)
        parser.error(
            f"part {options.part} has no step whose name contains {' or '.join(options.steps)}; it has {names}"
        )
    if not options.cpu:
        install.unpack()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("gpu_day.sh: ended by SIGTERM"))  # ends the running step, too
    record: dict[str, Any] = {}
    if not options.steps:
        shutil.rmtree(folder / options.part, ignore_errors=True)
    for record in run_part(part, folder / options.part, options.cpu):
        add(folder / RESULTS, options.part, record)
    print(f"\n{table(record['steps'])}\n\n{folder / RESULTS}: part {options.part} after {record['seconds']:.0f} s")
    return sum(is_failure(step) for step in record["steps"])


def chosen(part: Part, texts: Sequence[str] | None) -> Part:
    """The part with only the steps whose names contain one of the texts; all steps without texts."""
    return part if texts is None else Part(part.title, tuple(s for s in part.steps if any(t in s.name for t in texts)))


def is_failure(step: Mapping[str, Any]) -> bool:
    """Whether a step ran and did not succeed."""
    return step["status"] not in (OK, NEEDS_GPU) and not step["status"].startswith(SKIPPED)


def run_part(part: Part, folder: Path, on_cpu: bool, package: str = "gpu_day") -> Iterator[dict[str, Any]]:
    """Run the steps in order; after each one, yield the part's record so far.

    Args:
        folder: for one JSON file and one log per step.
        package: package of the steps' modules.
    """
    folder.mkdir(parents=True, exist_ok=True)
    began, started = datetime.now(timezone.utc), time.monotonic()
    num_gpus = 0 if on_cpu else len(gpus())
    steps: list[dict[str, Any]] = []
    for step in part.steps:
        left_s = PART_LIMIT_S - (time.monotonic() - started)
        steps.append(_result(step, folder, on_cpu, num_gpus, left_s, package))
        yield {
            "title": part.title,
            "on_cpu": on_cpu,
            "began": f"{began:%Y-%m-%d %H:%M} UTC",
            "seconds": round(time.monotonic() - started, 1),
            "machine": machine(),
            "steps": [*steps],
        }


def machine() -> dict[str, Any]:
    """The machine and the versions, as far as they can be found without torch."""

    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    packages = {name: installed(name) for name in ("torch", "triton", "megatron-core", "transformer-engine")}
    return {"gpus": gpus(), "driver": _nvidia_smi("driver_version")[:1], **packages, "commit": commit(), **_host()}


def _host() -> dict[str, Any]:
    memory_gib = psutil.virtual_memory().total / 2**30
    return {"python": sys.version.split()[0], "cores": os.cpu_count(), "memory_gib": round(memory_gib)}


def gpus() -> list[str]:
    """The names of the GPUs, from nvidia-smi."""
    return _nvidia_smi("name")


def _nvidia_smi(field: str) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return result.stdout.split("\n")[:-1]


def commit() -> str:
    """The commit of the checkout; where git does not know it, the one that ``pack`` wrote down."""
    packed = install.PACKED / "commit"
    found = ranks.commit()
    return packed.read_text().strip() if found == "unknown" and packed.exists() else found


def _result(step: Step, folder: Path, on_cpu: bool, num_gpus: int, left_s: float, package: str) -> dict[str, Any]:
    """Run one step; return its status, seconds and figures, and the end of its log if it failed."""
    if on_cpu and step.on_cpu is None:
        return {"name": step.name, "status": NEEDS_GPU, "seconds": 0.0}
    if not on_cpu and step.needs and find_spec(step.needs) is None:
        wanted = f"needs {step.needs}, which is neither installed nor packed"
        return {"name": step.name, "status": wanted, "seconds": 0.0}
    are_too_few = not on_cpu and num_gpus < step.num_gpus
    sharing = shared_nccl.variables() if are_too_few and num_gpus else {}
    if are_too_few and not sharing:
        wanted = f"needs {step.num_gpus} or more GPUs, or one and a packed NCCL; found {num_gpus}"
        return {"name": step.name, "status": wanted, "seconds": 0.0}
    file = folder / step.name.replace(",", "").replace(" ", "-")
    output, log = file.with_suffix(".json"), file.with_suffix(".log")
    output.unlink(missing_ok=True)
    words = _words(step, folder, output, on_cpu, package)
    limit_s = min(step.limit_s * (_PATIENCE_ON_CPU if on_cpu else 1), max(left_s, 1.0))
    print(f"{step.name}: {shlex.join(words)} (at most {limit_s:.0f} s)", flush=True)
    started = time.monotonic()
    per_gpu = -(-step.num_gpus // num_gpus) if step.shares_gpu and num_gpus else 1
    with log.open("w", encoding="utf-8") as stream, mps.shared_gpu(per_gpu) as served:
        variables = {**_variables(step, on_cpu), **sharing, **served}
        code = _run([sys.executable, "-m", *words], variables, stream, limit_s)
    seconds = time.monotonic() - started
    figures, problem = _figures(output)
    if code is None:
        problem = f"timed out after {limit_s:.0f} s"
    elif code:
        problem = f"exit status {code}"
    status, shown = (problem, "") if problem else _shown(step.reads, figures)
    result: dict[str, Any] = {"name": step.name, "command": shlex.join(words), "status": status, "commit": commit()}
    result |= {"seconds": round(seconds, 1), "shown": shown, "figures": figures}
    if is_failure(result):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        result["last_lines"] = lines
        print("\n".join(f"    {line}" for line in lines))
    print(f"{step.name}: {status} after {seconds:.0f} s {shown}", flush=True)
    return result


def _words(step: Step, folder: Path, output: Path, on_cpu: bool, package: str) -> list[str]:
    """What follows ``python -m``."""
    arguments = ((step.on_cpu if on_cpu else step.arguments) or "").format(folder=folder)
    device = "cpu" if on_cpu else "cuda"
    words = [f"{package}.{step.module}", *shlex.split(arguments), "--device", device, "--output", str(output)]
    num_ranks = min(step.num_ranks, 2) if on_cpu else step.num_ranks
    if num_ranks > 1:
        words = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), "-m", *words]
    return words


def _variables(step: Step, on_cpu: bool) -> dict[str, str]:
    """The environment of a step; what is set here, outside of the step, wins over the defaults."""
    threads = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"} if on_cpu else {"OMP_NUM_THREADS": "2"}
    return {**_ENVIRONMENT, **threads, **ranks.environment(), **step.environment}


def _run(command: list[str], variables: dict[str, str], stream: Any, limit_s: float) -> int | None:
    """Run a command; return the exit status, or None after the limit. No process of it is left in any case."""
    mark = f"{os.getpid()} {time.monotonic_ns()}"
    variables = {**variables, _MARK: mark}
    process = subprocess.Popen(
        command, cwd=ranks.ROOT, env=variables, stdout=stream, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(mark)
        process.wait()


def end(mark: str) -> None:
    """End the processes of a step: SIGTERM, so that a launcher ends its ranks, then SIGKILL.

    They are recognized by a variable that they inherit: ranks lead process groups of their own, and those of a launcher
    that has crashed are no longer its descendants.
    """
    family = [process for process in psutil.process_iter() if _has(process, mark)]
    for member in family:
        _signal(member.terminate)
    _, left = psutil.wait_procs(family, timeout=_GRACE_S)
    for member in left:
        _signal(member.kill)


def _has(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(_MARK) == mark
    except psutil.Error:  # it has ended, or belongs to another user
        return False


def _signal(send: Any) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        send()


def _figures(output: Path) -> tuple[dict[str, Any], str]:
    """The figures of a step, and what is wrong with their file."""
    if not output.exists():
        return {}, "wrote no figures"
    try:
        found = json.loads(output.read_text(encoding="utf-8"))
    except ValueError as error:
        return {}, f"figures are not JSON: {error}"
    return (found, "") if isinstance(found, dict) else ({}, "figures are not a JSON object")


def _shown(reads: str, figures: Mapping[str, Any]) -> tuple[str, str]:
    """The status that follows from the figures, and what the table shows of them."""
    if "skip_reason" in figures:
        return f"{SKIPPED}{figures['skip_reason']}", ""
    if bad := sorted(_not_finite(figures)):
        return f"not finite: {', '.join(bad)}", ""
    try:
        return OK, reads.format_map(figures)
    except KeyError as error:
        return f"lacks the figure {error}", ""
    except (TypeError, ValueError) as error:
        return f"has a figure of another type: {error}", ""


def _not_finite(value: Any, name: str = "") -> Iterable[str]:
    """The names of figures that are NaN or infinite."""
    if isinstance(value, float) and not math.isfinite(value):
        yield name
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from _not_finite(part, f"{name}.{key}" if name else str(key))


def add(path: Path, part: str, record: Mapping[str, Any]) -> None:
    """Write the part's record into the file of all parts, in place of an earlier record of the same steps."""
    parts = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(join(parts, {part: record}), indent=1) + "\n", encoding="utf-8")


def join(parts: Mapping[str, Any], newer: Mapping[str, Any]) -> dict[str, Any]:
    """The records of parts, with newer ones; steps that the newer record of a part lacks stay, if both are of GPUs."""
    joined = dict(parts)
    for name, part in newer.items():
        order = [step.name for step in PARTS[name].steps]
        old = parts.get(name, part)
        lacking = {*order} - {step["name"] for step in part["steps"]} if old["on_cpu"] == part["on_cpu"] else {}
        steps = [*part["steps"], *(_dated(step, old) for step in old["steps"] if step["name"] in lacking)]
        places = {step: place for place, step in enumerate(order)}
        joined[name] = {**part, "steps": sorted(steps, key=lambda step: places.get(step["name"], len(places)))}
    return joined


def _dated(step: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """A step with the commit that it ran, which is that of its part if it does not say so."""
    return {"commit": part["machine"]["commit"], **step}


def table(steps: Iterable[Mapping[str, Any]]) -> str:
    """One line per step: name, status, seconds, and what it found."""
    rows = [("step", "status", "s", "figures")]
    rows += [(s["name"], s["status"], f"{s['seconds']:.0f}", s.get("shown", "")) for s in steps]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


if __name__ == "__main__":
    sys.exit(main())
