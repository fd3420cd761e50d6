"""The generated parts of docs/gpu.md and the status of GPUs in the README, from docs/gpu_day.json if it exists."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from gpu_day import steps as day
from gpu_day.steps import OK
from site_parts.markdown import code, table

_ROOT = Path(__file__).parent.parent.parent
Figures = Mapping[str, Any]


def stored() -> dict[str, Any]:
    """The records of the parts that ran on a GPU; empty before the first run."""
    file = _ROOT / "docs/gpu_day.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def words(parts: Figures | None = None) -> str:
    """One sentence for the status in the head of the README."""
    parts = stored() if parts is None else parts
    if not parts:
        return (
            "**Not yet run on a GPU**: code and tests for GPUs are written, no GPU figure exists "
            "([how to run them](docs/gpu.md))."
        )
    ok, ran = _counts(parts)
    found = ["the same bits as stock"] * _has_bits_of_stock(parts)
    found += [*_gains(parts), f"{ok} of {ran} checks passed ([GPU results](docs/gpu.md))"]
    missing = [name for name, is_missing in _MISSING.items() if is_missing(parts)]
    found += [f"{' and '.join(missing)}: not yet run"] if missing else []
    return f"**On {_where(parts)}**: {'; '.join(found)}."


def _where(parts: Figures) -> str:
    """The GPUs, and by how many ranks one is shared at most."""
    found = {tuple(part["machine"]["gpus"]) for part in parts.values()}
    gpus = " and ".join(sorted(f"{_NUMBERS.get(len(names), len(names))} {names[0]}" for names in found))
    most = max((s["figures"].get("ranks_per_gpu", 1) for s in _steps(parts) if s.get("figures")), default=1)
    return gpus if most < 2 else f"{gpus} shared by {_NUMBERS.get(most, most)} ranks"


_NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four"}
_MISSING: dict[str, Callable[[Figures], bool]] = {
    "TransformerEngine": lambda parts: "transformer-engine" not in parts,
    "several GPUs": lambda parts: all(len(part["machine"]["gpus"]) < 2 for part in parts.values()),
}


def _steps(parts: Figures) -> Iterator[Figures]:
    return (step for part in parts.values() for step in part["steps"])


def _has_bits_of_stock(parts: Figures) -> bool:
    """Whether runs were compared with stock bit for bit, and all were equal."""
    recorded = [r for s in _steps(parts) for r in s.get("figures", {}).get("recorded", {}).values() if "equal" in r]
    return bool(recorded) and all(_all_true(one["equal"]) for one in recorded)


def _all_true(value: Any) -> bool:
    return all(map(_all_true, value.values())) if isinstance(value, dict) else value is True


def _gains(parts: Figures) -> Iterator[str]:
    """The gain of ``auto`` and of the advised schedule: of ranks that do not slow each other, else of whole jobs."""
    ran = {step["name"]: step["figures"] for step in _steps(parts) if step["status"] == OK}
    if (found := ran.get("gains")) is not None:
        for name in ("auto", "zb_v"):
            measured, predicted = found[f"{name}_measured"], found[f"{name}_predicted"]
            yield f"`{name.replace('_', '-')}` {_faster(measured)} where {_percent(predicted)} was predicted"
    elif (found := ran.get("advice")) is not None:
        reached, promised = (_percent(found[f"{what}_gain"]) for what in ("measured", "predicted"))
        advised = f"`{found['advised']}` {reached} where {promised} was predicted"
        yield f"`auto` {_faster(found['auto_gain'])}, {advised} (its ranks slow each other)"


def _faster(gain: float) -> str:
    return f"{_percent(abs(gain))} {'faster' if gain >= 0 else 'slower'}"


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def _counts(parts: Figures) -> tuple[int, int]:
    # needs a GPU, or more of them
    ran = [s["status"] for s in _steps(parts) if not s["status"].startswith(("needs ", day.SKIPPED))]
    return ran.count(OK), len(ran)


def verified(parts: Figures | None = None) -> str:
    """The cell of the README's table of what was verified."""
    parts = stored() if parts is None else parts
    if not parts:
        return "not yet"
    ok, ran = _counts(parts)
    return f"{ok} of {ran} checks on {_where(parts)}"


def status(parts: Figures | None = None) -> str:
    """The first paragraph of the page."""
    parts = stored() if parts is None else parts
    if not parts:
        return (
            "**Nothing has run on a GPU yet.** No figure on this page or elsewhere in this documentation was measured "
            "on a GPU. The steps below are ready; CI runs, with tiny sizes, those that do not need a GPU."
        )
    ok, ran = _counts(parts)
    bad = [f"*{s['name']}* ({s['status']})" for s in _steps(parts) if s["status"] != OK]
    missing = [f"{part.title} (`{name}`)" for name, part in day.PARTS.items() if name not in parts]
    rest = f" Without success: {', '.join(bad)}." if bad else ""
    rest += f" Not yet run: {', '.join(missing)}." if missing else ""
    return f"On {_where(parts)}, {ok} of {ran} steps succeeded.{rest}"


def steps() -> str:
    """What each part does."""
    rows = [
        (name, step.name, code(f"gpu_day.{step.module} {step.arguments}".strip()), f"{step.limit_s} s", _on_cpu(step))
        for name, part in day.PARTS.items()
        for step in part.steps
    ]
    words = f"A part ends after at most {day.PART_LIMIT_S} s, a step after its own limit."
    return f"{words}\n\n{table(('part', 'step', 'module and arguments', 'limit', 'with `--cpu`'), rows)}"


def _on_cpu(step: day.Step) -> str:
    return "no" if step.on_cpu is None else "yes"


def results(parts: Figures | None = None) -> str:
    """The table of steps of every part that ran, and the figures behind it."""
    parts = stored() if parts is None else parts
    if not parts:
        return "None yet."
    return "\n\n".join(_part(name, part) for name, part in parts.items())


def _part(name: str, part: Figures) -> str:
    machine = part["machine"]
    gpus = f"{len(machine['gpus'])} x {machine['gpus'][0]}" if machine["gpus"] else "no GPU"
    commits = dict.fromkeys(step.get("commit", machine["commit"]) for step in part["steps"])
    versions = f"torch {machine['torch']}, megatron-core {machine['megatron-core']}, commit {', '.join(commits)}"
    where = f"{gpus}, driver {', '.join(machine['driver'])}, {versions}; {part['began']}, {part['seconds']:.0f} s."
    rows = [(s["name"], s["status"], f"{s['seconds']:.0f}", s.get("shown", "")) for s in part["steps"]]
    shown = [f"### `{name}`: {part['title']}\n\n{where}", table(("step", "status", "s", "figures"), rows)]
    for step in part["steps"]:
        detail = _DETAILS.get(step["name"])
        if detail and step["status"] == OK:
            shown.append(f"**{step['name'][:1].upper()}{step['name'][1:]}.** {detail(step['figures'])}")
    return "\n\n".join(shown)


def _products(figures: Figures) -> str:
    names = {"library": "library us", "fused": "fused us", "fused, bias": "with bias"}
    names |= {name: name for name in ("reference", "unfused", "TransformerEngine")}
    names = {name: head for name, head in names.items() if name in figures["rows"][0]["us"]}
    rows = [
        (
            str(row["hidden_size"]),
            row["dtype"],
            row["weight"],
            f"{row['tflops']:.0f}",
            *(f"{row['us'][name]:.0f}" for name in names),
        )
        for row in figures["rows"]
    ]
    head = ("hidden size", "dtype", "weight", "TFLOP/s, fused", *names.values())
    return f"The library's time is that of its bare product.\n\n{table(head, rows)}"


def _passes(figures: Figures) -> str:
    def ms(row: Figures) -> Iterable[str]:
        costs = row["costs"]
        for key in ("forward_ms", "backward_ms", "wgrad_ms"):
            yield "-" if costs is None or (key == "wgrad_ms" and not costs[key][0]) else f"{costs[key][0]:.2f}"

    rows = [
        (
            row["variant"],
            f"{row['iteration_ms']:.1f}",
            *ms(row),
            f"{row['host_ms']:.2f}",
            "-" if row["idle_share"] is None else f"{row['idle_share']:.1%}",
            *(f"{row['memory'][key] / 2**30:.1f}" for key in ("allocated", "reserved")),
        )
        for row in figures["rows"]
    ]
    head = ("variant", "iteration ms", "F", "B", "W", "host ms per pass", "idle", "allocated GiB", "reserved GiB")
    return f"B of a fused backward includes W.\n\n{table(head, rows)}"


def _spin(figures: Figures) -> str:
    rows = [
        (str(row["blocks"]), *(f"{row[key]:.2f}" for key in ("forward_ms", "backward_ms", "wgrad_ms")))
        for row in figures["rows"]
    ]
    return (
        "Times of passes while a kernel occupies multiprocessors, as a receive that waits does.\n\n"
        f"{table(('multiprocessors', 'F ms', 'B ms', 'W ms'), rows)}"
    )


def _fragments(figures: Figures) -> str:
    rows = [
        (row["schedule"], str(rank), *(f"{one[key] / 2**20:.0f}" for key in ("allocated", "reserved")))
        for row in figures["rows"]
        for rank, one in enumerate(row["ranks"])
    ]
    head = ("schedule", "rank", "allocated MiB", "reserved MiB")
    return f"Peaks after {figures['iterations']} iterations.\n\n{table(head, rows)}"


def _within_limit(figures: Figures) -> str:
    rows = [
        (
            row["schedule"],
            str(rank),
            *(f"{one[key] / 2**20:.0f}" for key in ("allocated", "reserved")),
            str(one["flushes"]),
            f"{one['limited_ms'] / one['ms'] - 1:+.1%}",
        )
        for row in figures["rows"]
        for rank, one in enumerate(row["ranks"])
    ]
    head = ("schedule", "rank", "allocated MiB", "reserved MiB", "flushes", "iteration")
    words = (
        "Peaks without a limit; then what changes if torch may reserve 1.15 times the allocated peak: flushes of its "
        f"cache in {figures['iterations'] + 1} iterations, and the time of one."
    )
    return f"{words}\n\n{table(head, rows)}"


def _waits(figures: Figures) -> str:
    rows = [(row["action"], f"{row['ms']:.2f}", "yes" if row["waits"] else "no") for row in figures["rows"]]
    words = (
        f"Time until the host returns from each call while a kernel spins ({figures['loading'].lower()} loading). A "
        "host that waits returns at the kernel's time limit."
    )
    return f"{words}\n\n{table(('call', 'ms', 'waits'), rows)}"


def _apart(figures: Figures) -> str:
    rows = [
        (
            str(row["microbatches"]),
            row["variant"],
            *(f"{row[f'{what}_ms']:.1f}" for what in ("predicted", "measured")),
            *(f"{row[what]:+.1%}" if row["variant"] != "stock" else "-" for what in ("predicted", "measured")),
        )
        for row in figures["rows"]
    ]
    head = ("microbatches", "variant", "predicted ms", "iteration ms", "predicted gain", "measured gain")
    tries = ", ".join(f"{one['share']} % ({one['slowdown']:+.1%})" for one in figures["tries"])
    words = (
        f"{figures['num_ranks']} ranks, {figures['ranks_per_gpu'] or 'none'} per GPU. Shares of the multiprocessors "
        f"that were tried, and by how much the others slowed the passes of a rank: {tries}; the last counts."
    )
    return f"{words}\n\n{table(head, rows)}"


def _bubbles(figures: Figures) -> str:
    rows = [
        (
            row["schedule"],
            *(f"{row[what]['ms']:.1f}" for what in ("measured", "predicted")),
            *(f"{row[what]['bubble']:.1%}" for what in ("measured", "predicted")),
        )
        for row in figures["rows"]
    ]
    head = ("schedule", "iteration ms", "predicted ms", "bubble", "predicted bubble")
    words = (
        f"{figures['num_ranks']} ranks, {figures['ranks_per_gpu'] or 'none'} per GPU. Predicted from the passes and "
        "messages of the same iterations. The bubble is the share of the iteration in which the busiest rank does not "
        "compute."
    )
    return f"{words}\n\n{table(head, rows)}"


def _bandwidth(figures: Figures) -> str:
    rows = [
        (str(row["ctas"]), f"{row['gb_per_s']:.1f}", f"{row['products_ms']:.2f}", f"{row['slowdown']:+.1%}")
        for row in figures["rows"]
    ]
    words = "Messages from one rank to the other, alone, and what matrix products lose next to them."
    return f"{words}\n\n{table(('CTAs', 'GB/s', 'products ms', 'next to messages'), rows)}"


def _predicted(figures: Figures) -> str:
    names = list(figures["rows"][0]["bubbles"])
    rows = [
        (
            str(row["num_ranks"]),
            *(f"{row['bubbles'][n]['span']:.1%} / {row['bubbles'][n]['makespan']:.1%}" for n in names),
        )
        for row in figures["rows"]
    ]
    words = (
        "Predicted from the passes above, not measured: span / makespan, four microbatches per rank, free transfers."
    )
    return f"{words}\n\n{table(('ranks', *names), rows)}"


def _offload(figures: Figures) -> str:
    rows = [
        (
            row["offload"],
            f"{row['iteration_ms']:.1f}",
            f"{row['load']:.2f}" if row["load"] else "-",
            f"{row['gb_per_s']:.1f}" if row["load"] else "-",
            f"{row['memory']['allocated'] / 2**30:.1f}",
            f"{row['host'] / 2**30:.1f}",
        )
        for row in figures["rows"]
    ]
    head = ("offload", "iteration ms", "copies / passes", "GB/s", "allocated GiB", "host GiB")
    words = (
        f"All forwards first, on one rank. A plain copy of pinned memory runs at {figures['plain_gb_per_s']:.1f} GB/s. "
        "Copies / passes is the time of both copies of a microbatch over that of its passes."
    )
    return f"{words}\n\n{table(head, rows)}"


def _decide(figures: Figures) -> str:
    predicted, stock = figures["predicted"], figures["times_ms"]["stock"]
    rows = [
        (
            name,
            f"{median(times):.1f}",
            f"{predicted[name]:+.1%}" if name in predicted else "-",
            f"{figures['measured'][name]:+.1%}" if times is not stock else "-",
        )
        for name, times in figures["times_ms"].items()
    ]
    words = (
        "Iterations in whole, with the optimizer. The predictions, by `advise --costs`, are of the passes of a run "
        f"under `zb-h1`, which take {figures['job_ms']:.1f} ms under the job's own schedule; `slice_overhead` of that "
        f"run: {figures['slice_overhead']:.2f}. Advised: {figures['advised']}."
    )
    return f"{words}\n\n{table(('run', 'iteration ms', 'predicted gain', 'measured gain'), rows)}"


_DETAILS: dict[str, Callable[[Figures], str]] = {
    "gains": _apart,
    "next to TransformerEngine": _products,
    "weight gradients": _products,
    "memory": _fragments,
    "memory, little more than the peak": _within_limit,
    "memory, expandable segments": _fragments,
    "host calls next to a spinning kernel": _waits,
    "host calls, modules loaded eagerly": _waits,
    "copies to host memory": _offload,
    "passes": _passes,
    "predicted bubbles": _predicted,
    "passes, small": _passes,
    "spinning receives": _spin,
    "measured bubbles": _bubbles,
    "bandwidth by CTAs": _bandwidth,
    "advice": _decide,
    "advice, few microbatches": _decide,
}
"""What the page shows of a step besides its line. *Measured bubbles* has stored results, but is no step any more."""


def published() -> str:
    """The bubble rates of the zero-bubble paper."""
    lines = (_ROOT / "configs/published/zero_bubble_table5.csv").read_text(encoding="utf-8").splitlines()
    keys = ("one_f_one_b", "one_f_one_b_interleaved", "zb_h1", "zb_h2", "zb_1p", "zb_2p")
    rows = [
        (
            row["model"],
            row["p"],
            row["m"],
            *(row[f"t_{kind}_ms"] for kind in "fbw"),
            *(f"{float(row[k]):.1%}" for k in keys),
        )
        for row in csv.DictReader(line for line in lines if not line.startswith("#"))
    ]
    head = ("model", "p", "m", "F ms", "B ms", "W ms", "1F1B", "interleaved", "ZB-H1", "ZB-H2", "ZB-1p", "ZB-2p")
    return table(head, rows)


PARTS: dict[str, Callable[[], str]] = {
    "gpu-words": words,
    "gpu-status": status,
    "gpu-steps": steps,
    "gpu-results": results,
    "gpu-published": published,
}
