"""``zero-bubble plan`` and ``compare`` with vocabulary parallelism."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble.__main__ import main

Capture = pytest.CaptureFixture[str]
SIZES = ["--num-ranks", "4", "--num-microbatches", "12"]
TIMES = ["--forward-ms", "1", "--backward-ms", "1", "--wgrad-ms", "1"]
SHARDS = ["--output-ms", "0.25", "--output-wgrad-ms", "0.25"]
STOCK = str(Path(__file__).parents[2] / "configs" / "published" / "vocabulary_a100" / "stock_256k.json")


def run_json(capsys: Capture, *flags: str) -> dict[str, Any]:
    assert main([*flags, "--format", "json"]) == 0
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def test_times_of_shards_put_their_passes_into_the_plan(capsys: Capture) -> None:
    flags = ["plan", "--schedule", "zb-h1", *SIZES, *TIMES, *SHARDS, "--objective", "makespan"]
    made = run_json(capsys, *flags, "--vocabulary", "2")
    assert made["vocabulary"] == 2 and made["makespan_ms"] == pytest.approx(12 * 3.5 + 3)
    slower = run_json(capsys, *flags, "--vocabulary", "2", "--embedding-ms", "0.5", "--embedding-wgrad-ms", "0.5")
    assert slower["makespan_ms"] >= made["makespan_ms"] + 12
    assert run_json(capsys, *flags, "--collective-ms", "2")["makespan_ms"] > made["makespan_ms"]


def test_a_plan_is_read_again(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    flags = [*TIMES, *SHARDS, "--memory-limit", "2p"]
    made = run_json(capsys, "plan", "--schedule", "zb-h1", *SIZES, *flags)
    file.write_text(json.dumps(made))
    read = run_json(capsys, "plan", "--schedule-file", str(file), *flags)
    assert {**read, "planning_seconds": 0} == {**made, "planning_seconds": 0}
    assert read["lower_bound_ms"] >= 12 * 3.5
    other = "2" if made["vocabulary"] == 1 else "1"
    assert main(["plan", "--schedule-file", str(file), *flags, "--vocabulary", other]) == 2
    assert "--vocabulary must be that of the schedule file" in capsys.readouterr().err


def test_auto_divides_a_large_vocabulary(capsys: Capture) -> None:
    """On 8 A100s with 256k tokens, the authors' vocabulary parallelism makes an iteration 1.97 times as fast."""
    flags = ["plan", "--num-ranks", "8", "--num-microbatches", "24", "--costs", STOCK]
    made = run_json(
        capsys,
        *flags,
        "--schedule",
        "zb-auto",
        "--vocabulary",
        "auto",
        "--placement",
        "linear",
        "--memory-limit",
        "1.125p",
    )
    stock = run_json(capsys, *flags, "--schedule", "1f1b")
    assert made["vocabulary"] in (1, 2) and stock["makespan_ms"] > 1.8 * made["makespan_ms"]
    assert max(made["peak_activation"]) <= 9.5 and made["gap"] >= 0
    assert made["schedule"].startswith("zb-auto (vocabulary")


def test_compare_has_a_row_for_each_variant(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    dense = {"forward_ms": 1, "backward_ms": 1, "wgrad_ms": 1}
    loss = {"forward_ms": 4, "backward_ms": 4, "wgrad_ms": 4}
    file.write_text(json.dumps({"layers": ["dense*8"], "parts": {"dense": dense, "loss": loss}}))
    flags = ["compare", "--num-ranks", "2", "--num-microbatches", "8", "--costs", str(file), "--max-chunks", "1"]
    table = run_json(
        capsys, *flags, "--equal-passes", "--memory-limit", "2p", "--vocabulary", "auto", "--placement", "vee"
    )
    names = {row["schedule"] for row in table["rows"]}
    for name in ("1f1b", "zb-v", "zb-auto"):
        assert {name, f"{name} (vocabulary 1)", f"{name} (vocabulary 2)"} <= names
    assert table["rows"][0]["speedup_over_1f1b"] > 1.25
    assert "(vocabulary" in table["rows"][0]["schedule"]
    on_a_v = [row["span_ms"] for row in table["rows"] if row["within_limit"] and row["placement"] == "vee"]
    assert min(on_a_v) >= table["lower_bound_ms"]["vee"]


@pytest.mark.parametrize(
    "flags, message",
    [
        ([*TIMES, "--vocabulary", "2"], "vocabulary parallelism needs the times of its passes"),
        ([*TIMES, "--output-ms", "1"], "--output-ms needs --output-wgrad-ms as well; it is missing"),
        ([*TIMES, *SHARDS, "--vocabulary", "off"], "do not suit a job that does not divide them"),
        ([*TIMES, *SHARDS, "--recompute-logits"], "--recompute-logits changes only estimated times"),
        (["--costs", STOCK, *SHARDS], "--costs gives the times of all passes; leave out --output-ms"),
        (["--costs", STOCK, "--recompute-logits", "--vocabulary", "off"], "applies only to --vocabulary 1, 2 or auto"),
        (["--costs", STOCK, "--recompute-logits"], "applies only to --vocabulary 1, 2 or auto"),
        (["--costs", STOCK, "--recompute-logits", "--layout", "auto"], "applies only to --vocabulary 1, 2 or auto"),
        ([*TIMES, "--output-ms", "-1", "--output-wgrad-ms", "1"], "output_ms of rank 0 must be a finite number"),
    ],
)
def test_unsuitable_flags_are_refused(capsys: Capture, flags: list[str], message: str) -> None:
    sizes = ["--num-ranks", "8", "--num-microbatches", "12"]
    assert main(["plan", "--schedule", "zb-h1", *sizes, *flags]) == 2
    assert message in capsys.readouterr().err


def test_files_choose_what_the_flags_exclude(capsys: Capture, tmp_path: Path) -> None:
    """A vocabulary that only the costs or the schedule file divide was left out of sharded units."""
    of_file = {"divided": ["zb-v", "--vocabulary", "2", *SHARDS], "sliced": ["seq-zb-h1", "--num-slices", "2"]}
    for name, flags in of_file.items():
        made = run_json(capsys, "plan", "--schedule", *flags, *SIZES, *TIMES)
        (tmp_path / f"{name}.json").write_text(json.dumps(made))
    figures = {"forward_ms": 1, "backward_ms": 1, "wgrad_ms": 1, "output_ms": 0.25, "output_wgrad_ms": 0.25}
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(figures))
    by_costs, divided = ["--costs", str(costs)], ["--schedule-file", str(tmp_path / "divided.json")]
    for command, one in (
        (["plan", "--schedule", "zb-v", *SIZES, *by_costs, "--shard-weights"], "sharded units"),
        (["compare", *SIZES, *by_costs, "--shard-weights"], "sharded units"),
        (["plan", *divided, *TIMES, "--shard-weights"], "sharded units"),
        (["plan", "--schedule-file", str(tmp_path / "sliced.json"), *TIMES, *SHARDS], "sequence slices"),
    ):
        assert main(command) == 2
        assert f"{one} and vocabulary parallelism exclude each other" in capsys.readouterr().err
