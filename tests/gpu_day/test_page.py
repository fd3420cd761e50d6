"""Tests of the page of GPU results: it claims nothing before a run, and shows failures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gpu_day import page
from gpu_day.steps import OK, PARTS, SKIPPED
from site_parts import gpu

ROOT = Path(__file__).parents[2]
MACHINE = {"gpus": ["NVIDIA X"], "driver": ["1.2"], "torch": "2.11", "megatron-core": "0.16.1", "commit": "abc"}


def part(name: str, statuses: dict[str, str], figures: dict[str, Any] | None = None) -> dict[str, Any]:
    steps = [
        {"name": step, "status": status, "seconds": 3.0, "shown": f"{step} shown", "figures": figures or {}}
        for step, status in statuses.items()
    ]
    title = PARTS[name].title
    return {"title": title, "on_cpu": False, "began": "today", "seconds": 6.0, "machine": MACHINE, "steps": steps}


PASSES = {
    "rows": [
        {
            "variant": variant,
            "iteration_ms": 300.25,
            "host_ms": 1.5,
            "idle_share": idle,
            "costs": costs,
            "memory": {"allocated": 2**30, "reserved": 2**31},
        }
        for variant, idle, costs in (
            ("stock 1F1B", 0.125, {"forward_ms": [20.5], "backward_ms": [41.5], "wgrad_ms": [0.0]}),
            ("split, wgrad stream", None, None),
        )
    ]
}


def test_without_results_the_page_claims_nothing() -> None:
    assert "Nothing has run on a GPU yet" in gpu.status({})
    assert "Not yet run on a GPU" in gpu.words({}) and gpu.verified({}) == "not yet"
    assert gpu.results({}) == "None yet."


def test_stored_results_are_what_the_pages_show() -> None:
    """The checkout's own state: the README and the page agree on whether something ran."""
    ran = bool(gpu.stored())
    assert ("Not yet run on a GPU" in (ROOT / "README.md").read_text()) is not ran
    assert ("Nothing has run on a GPU yet" in (ROOT / "docs/gpu.md").read_text()) is not ran


def test_results_show_failures_and_what_is_missing() -> None:
    statuses = {"passes": OK, "memory": "timed out after 80 s", "several": "needs 2 or more GPUs, found 1"}
    parts = {"passes": part("passes", statuses, PASSES)}
    assert gpu.status(parts).startswith(
        "On one NVIDIA X, 1 of 2 steps succeeded. Without success: *memory* (timed out after 80 s), *several* (needs "
        "2 or more GPUs, found 1). Not yet run: "
    )
    assert "against stock, over NCCL (`stock`)" in gpu.status(parts)
    assert gpu.words(parts) == (
        "**On one NVIDIA X**: 1 of 2 checks passed ([GPU results](docs/gpu.md)); TransformerEngine and several GPUs: "
        "not yet run."
    )
    text = gpu.results(parts)
    assert "| memory | timed out after 80 s | 3 | memory shown |" in text
    assert "| stock 1F1B | 300.2 | 20.50 | 41.50 | - | 1.50 | 12.5% | 1.0 | 2.0 |" in text
    assert "| split, wgrad stream | 300.2 | - | - | - | 1.50 | - | 1.0 | 2.0 |" in text
    assert "Peaks after" not in text, "a failed step has no details"


def test_words_say_what_was_gained() -> None:
    advice = {
        "advised": "zb-v",
        "auto_gain": 0.089,
        "measured_gain": 0.016,
        "predicted_gain": 0.219,
        "ranks_per_gpu": 4,
    }
    parts = {"advice": part("advice", {"advice": OK}, advice), "transformer-engine": part("transformer-engine", {})}
    gains = "`auto` 9 % faster, `zb-v` 2 % where 22 % was predicted (its ranks slow each other); 1 of 1 checks passed"
    assert gpu.words(parts).startswith(f"**On one NVIDIA X shared by four ranks**: {gains} (")
    assert gpu.words(parts).endswith("; several GPUs: not yet run.")
    assert gpu.verified(parts) == "1 of 1 checks on one NVIDIA X shared by four ranks"


def test_words_take_the_gains_of_ranks_that_do_not_slow_each_other() -> None:
    figures = {"auto_measured": 0.21, "auto_predicted": 0.22, "zb_v_measured": -0.01, "zb_v_predicted": 0.2}
    advice = {"advised": "zb-v", "auto_gain": 0.089, "measured_gain": 0.016, "predicted_gain": 0.219}
    parts = {"ranks": part("ranks", {"gains": OK}, figures), "advice": part("advice", {"advice": OK}, advice)}
    gains = "`auto` 21 % faster where 22 % was predicted; `zb-v` 1 % slower where 20 % was predicted; 2 of 2"
    assert gains in gpu.words(parts)


@pytest.mark.parametrize(
    ("equal", "claims"), [({"zb-v": {"all": True}}, True), ({"1f1b": True, "zb-h1": False}, False)]
)
def test_words_claim_the_bits_of_stock_only_if_all_were_equal(equal: dict[str, Any], claims: bool) -> None:
    stock = part("stock", {"bits": OK}, {"recorded": {"test_bits": {"equal": equal}, "test_other": {"steps": 3}}})
    assert ("the same bits as stock" in gpu.words({"stock": stock})) is claims


def test_skipped_steps_did_not_run() -> None:
    parts = {"features": part("features", {"a": OK, "memory checker": f"{SKIPPED}not this GPU"})}
    assert gpu.status(parts).startswith("On one NVIDIA X, 1 of 1 steps succeeded.")


def test_details_belong_to_steps() -> None:
    names = {step.name for one in PARTS.values() for step in one.steps}
    assert gpu._DETAILS.keys() <= names | {"measured bubbles"}, "of which results are stored"


def test_files_are_merged_by_part(tmp_path: Path) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    one.write_text(json.dumps({"runs": part("runs", {"a": OK}), "correct": part("correct", {"a": "exit status 1"})}))
    two.write_text(json.dumps({"correct": part("correct", {"a": OK})}))
    merged = page.merged([one, two])
    assert list(merged) == ["correct", "runs"] and merged["correct"]["steps"][0]["status"] == OK


def test_steps_that_did_not_run_again_stay_with_their_commit(tmp_path: Path) -> None:
    first, second = (step.name for step in PARTS["correct"].steps[:2])
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    one.write_text(json.dumps({"correct": part("correct", {first: OK, second: "exit status 1"})}))
    two.write_text(json.dumps({"correct": part("correct", {second: OK}) | {"machine": {**MACHINE, "commit": "def"}}}))
    merged = page.merged([one, two])
    assert [(s["name"], s["status"]) for s in merged["correct"]["steps"]] == [(first, OK), (second, OK)]
    assert "commit abc, def" in gpu.results(merged)


def test_paths_of_the_machine_are_not_published(tmp_path: Path) -> None:
    ran = part("correct", {"a": "exit status 1"})
    ran["steps"][0] |= {"command": "gpu_day.a --output /mnt/me/a.json", "last_lines": ["rootdir: /mnt/me"]}
    (tmp_path / "one.json").write_text(json.dumps({"correct": ran}))
    assert page.merged([tmp_path / "one.json"]) == {"correct": part("correct", {"a": "exit status 1"})}
    stored = ROOT / page.STORED
    assert not stored.exists() or not re.search(r'["\s](/[\w.-]+){2}', stored.read_text())


@pytest.mark.parametrize("change", [{"on_cpu": True}, {"machine": {**MACHINE, "gpus": []}}], ids=["--cpu", "no GPU"])
def test_runs_without_a_gpu_are_not_published(tmp_path: Path, change: dict[str, Any]) -> None:
    file = tmp_path / "one.json"
    file.write_text(json.dumps({"correct": part("correct", {"a": OK}) | change}))
    with pytest.raises(ValueError, match=re.escape(f"got part correct of {file} without; run it where")):
        page.merged([file])
