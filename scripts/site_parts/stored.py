"""Tables of stored figures: results of the last full bench run, and the versions that the patches are for."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

from site_parts import gpu
from site_parts.markdown import code, table

_ROOT = Path(__file__).parent.parent.parent
_PATCHING = _ROOT / "megatron/zero_bubble/integration/patching"


def results() -> str:
    """Six rows of docs/benchmarks.json."""
    stored = json.loads((_ROOT / "docs/benchmarks.json").read_text())
    benches = {bench["name"]: bench["figures"] for bench in stored["benches"] if "figures" in bench}
    emulated, optimizers = benches["emulated"], benches["post-validation"]
    slept = (
        f"{emulated['num_ranks']} ranks, {emulated['num_microbatches']} microbatches, emulated passes that only wait"
    )
    real = next(row for row in benches["real-compute"]["rows"][::-1] if row["schedule"] == "zb-v, ours")
    peers = [row for row in benches["peers"]["rows"] if row["objective"] == "span"]
    limited = next(row for row in peers if row["memory"].startswith("0.4"))
    stock, zb_v = "stock 1F1B (megatron-core)", _median(emulated, "zb-v, ours")
    rows = [
        _times(slept, "ZB-V", zb_v, stock, _median(emulated, "1f1b, megatron")),
        _times(
            slept, "ZB-V", zb_v, "stock interleaved 1F1B (megatron-core)", _median(emulated, "interleaved, megatron")
        ),
        _times(slept, "ZB-V", zb_v, "ZBV of torch.distributed.pipelining", _median(emulated, "zbv, torch")),
        (
            f"GPT on two CPU ranks, {real['num_microbatches']} microbatches",
            "ZB-V",
            stock,
            _range(real["over_stock"]),
        ),
        _times(
            f"{optimizers['num_ranks']} ranks, {optimizers['num_microbatches']} microbatches, zb-auto in twice 1F1B's "
            "memory, with the optimizer",
            "post-validation",
            _median(optimizers, "post-validation", "optimizer"),
            "synchronous step",
            _median(optimizers, "synchronous", "optimizer"),
        ),
        (
            f"planned bubble (span), memory {limited['memory']} (p: 1F1B's), median of {limited['questions']} problems",
            f"zb-auto {limited['ours']:.1%}",
            f"best public schedule {limited['best_peer']:.1%}",
            f"{round(100 * limited['ours'], 1) - round(100 * limited['best_peer'], 1):+.1f} points",
        ),
    ]
    words = (
        f"Run {stored['run']} on {stored['machine']['processor']}, {stored['machine']['cores']} cores, no GPU; "
        f"megatron-core {stored['machine']['megatron_core']}, torch {stored['machine']['torch']}. Iteration times are "
        "medians over the rounds; brackets show their range."
    )
    return f"{words}\n\n{table(('what', 'ours', 'compared with', 'difference'), rows)}"


def compatibility() -> str:
    """What the package works with, from pyproject.toml's ranges and the seams, and what of it was verified how."""
    project = (_ROOT / "pyproject.toml").read_text()
    minors = _minors()
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", (_ROOT / "scripts/constraints.txt").read_text(), re.MULTILINE))
    (torch,) = re.findall(r'"torch>=([\d.]+)"', project)
    (engine,) = re.findall(r'"transformer-engine\[pytorch\]>=([\d.]+)"', project)
    rows = [
        ("megatron-core", f"{minors[0]} to {minors[-1]}", f"all minors; most tests run on {pins['megatron-core']}"),
        (
            "Megatron-LM",
            f"core_r{minors[0]}.0 to core_r{minors[-2]}.0, main",
            "its own `pretrain_gpt.py`, on CPU ranks",
        ),
        ("Python", "3.10 or newer", "training on 3.11; planning on 3.10 to 3.13"),
        ("torch", f"{torch} or newer", f"{pins['torch']}, CPU build; 2.15.0, CUDA build without a GPU"),
        ("TransformerEngine", f"{engine} or newer", "against a stand-in only"),
        ("CUDA GPUs, NCCL", "written, with tests", gpu.verified()),
    ]
    return table(("", "supported", "verified"), rows)


def _median(figures: Any, name: str, key: str = "schedule") -> float:
    row = next(row for row in figures["rows"] if row[key].startswith(name))
    return float(row["measured_ms"]["median"])


def _times(what: str, ours: str, ms: float, other: str, other_ms: float) -> tuple[str, str, str, str]:
    return what, f"{ours} {ms:.0f} ms", f"{other} {other_ms:.0f} ms", f"{ms / other_ms - 1:+.1%}"


def _range(ratio: Any) -> str:
    middle, least, most = (f"{ratio[key] - 1:+.1%}" for key in ("median", "least", "most"))
    return f"{middle} ({least} to {most})"


def versions() -> str:
    """The minors of megatron-core in the table of seams, what was read of them, and their diffs in patches/."""
    read = {
        release
        for digests in json.loads((_PATCHING / "bodies.json").read_text()).values()
        for releases in digests.values()
        for release in releases
    }
    rows = []
    for minor in _minors():
        known = ", ".join(sorted(each for each in read if each.startswith(f"{minor}.") and "+" not in each))
        release = f"core_r{minor}.0"
        diff = _ROOT / f"patches/{release}.diff"
        name = (release, diff.name) if diff.exists() else ("main", "main.diff")
        rows.append((minor, known, name[0], code(f"patches/{name[1]}")))
    for release, _, commit in (each.partition("+") for each in sorted(read) if "+" in each):
        rows.append((release.rpartition(".")[0], f"{release} of the dev branch", f"dev ({commit})", ""))
    return table(("megatron-core", "releases compared, function by function", "Megatron-LM", "diff"), rows)


def _minors() -> list[str]:
    """The keys of ``MINORS``, without importing megatron-core."""
    for node in ast.parse((_PATCHING / "seams.py").read_text()).body:
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "MINORS":
            assert isinstance(node.value, ast.Dict)
            return [str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)]
    raise LookupError("integration/patching/seams.py has no table MINORS")


def site_status() -> str:
    """The status of GPUs in the head of the README, for the first page of the site."""
    return gpu.words().replace("(docs/", "(")


PARTS = {"site-status": site_status, "results": results, "versions": versions, "compatibility": compatibility}
