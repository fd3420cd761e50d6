"""A layer is never divided: what plans say for more stages than the costs were recorded on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble.__main__ import main

Capture = pytest.CaptureFixture[str]
TIMES = ("forward_ms", "backward_ms", "wgrad_ms")
FEW = ("--max-chunks", "2", "--placement", "linear")
CONFIG = "configs/gpt_6.2b.yaml"


def recorded(path: Path, num_stages: int, layers: int, **more: object) -> str:
    """Write a file with 10 ms per pass and ``layers / num_stages`` of ``layers`` layers, and 4 ms more for the loss."""
    each = 10.0 * 4 * layers / (16 * num_stages)
    times = {name: [each] * (num_stages - 1) + [each + 4] for name in TIMES}
    path.write_text(json.dumps({**times, **more}))
    return str(path)


def compared(capsys: Capture, costs: str, *options: str) -> dict[str, Any]:
    sizes = ["--num-ranks", "4", "--num-microbatches", "8", "--memory-limit", "2p", "--objective", "makespan"]
    assert main(["compare", "--costs", costs, *sizes, "--equal-passes", *options, "--format", "json"]) == 0
    table: dict[str, Any] = json.loads(capsys.readouterr().out)
    return table


def test_rows_do_not_depend_on_the_number_of_stages_that_were_recorded(tmp_path: Path, capsys: Capture) -> None:
    """The stages of the placements that are compared are those of one model, however it was recorded."""
    tables, marked = [], []
    for stages in (4, 8, 16):
        file = recorded(tmp_path / f"{stages}.json", stages, 16, layers_per_stage=[16 // stages] * stages)
        rows = compared(capsys, file, "--max-chunks", "4")["rows"]
        marked += [row["schedule"] for row in rows if row.get("is_lower_bound")]
        tables.append({(row["schedule"], row["placement"]): row["makespan_ms"] for row in rows})
    for other in tables[1:]:
        assert other == pytest.approx(tables[0], rel=0.01)
    assert not marked
    assert tables[0]["interleaved-1f1b x2", "interleaved"] < tables[0]["1f1b", "linear"]


def test_one_layout_has_one_length_everywhere(tmp_path: Path, capsys: Capture) -> None:
    file = recorded(tmp_path / "costs.json", 4, 16, layers_per_stage=[4] * 4)
    table = compared(capsys, file, *FEW)
    (row,) = (row for row in table["rows"] if row["schedule"] == "zb-v")
    sizes = ["--num-ranks", "4", "--num-microbatches", "8", "--costs", file, "--objective", "makespan"]
    plan = ["plan", "--schedule", "zb-v", "--equal-passes", *sizes]
    assert main([*plan, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan_ms"] == row["makespan_ms"]
    assert main([*plan, "--layout", "auto"]) == 0
    assert f"the even split (Ett|(tt|)*6ttL, {row['makespan_ms']:.3f} ms)" in capsys.readouterr().out
    job = "--num-layers 16 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --mock-data --micro-batch-size 1"
    flags = f"{job} --global-batch-size 8 --train-iters 1 --lr 1 --pipeline-model-parallel-size 4"
    assert (
        main(
            ["dry-run", "--gpus-per-node", "4", "--costs", file, "--", *flags.split(), "--zero-bubble-schedule", "zb-v"]
        )
        == 0
    )
    assert f"{row['makespan_ms']:,.1f} ms" in capsys.readouterr().out


def test_unknown_layers_of_uneven_stages_give_a_lower_bound(tmp_path: Path, capsys: Capture) -> None:
    """The output layer cannot be divided; where the layers are unknown, the rows say that they may be too short."""
    bare = recorded(tmp_path / "bare.json", 4, 16)
    rows = compared(capsys, bare, *FEW)["rows"]
    assert {row["placement"] for row in rows if row["is_lower_bound"]} == {"vee", "interleaved"}
    assert {row["placement"] for row in rows if not row["is_lower_bound"]} == {"linear"}
    sizes = ["--num-ranks", "4", "--num-microbatches", "8", "--costs", bare]
    assert main(["compare", *sizes, "--equal-passes", *FEW]) == 0
    text = capsys.readouterr().out
    marked = [line for line in text.splitlines() if line.endswith("   lower bound")]
    assert len(marked) == sum(row["is_lower_bound"] for row in rows)
    assert "Shortest within the limit: zb-" in text and " is shorter than " not in text
    assert all((row["speedup_over_1f1b"] is None) is row["is_lower_bound"] for row in rows)
    assert "lower bound: the stages of the costs differ" in text and "or add layers_per_stage" in text
    assert main(["plan", "--schedule", "zb-v", *sizes]) == 0
    assert "A lower bound: the stages of the costs differ" in capsys.readouterr().out
    assert main(["plan", "--schedule", "zb-v", *sizes, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["is_lower_bound"] is True
    assert main(["plan", "--schedule", "zb-h1", *sizes]) == 0
    assert "lower bound: the stages" not in capsys.readouterr().out.lower()


def test_equal_stages_are_divided_without_a_mark(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({name: [10.0, 10.05, 10.0, 10.0] for name in TIMES}))
    assert not any(row["is_lower_bound"] for row in compared(capsys, str(file), *FEW)["rows"])


def test_rows_name_the_layout_that_the_flags_of_a_model_do_not_give(capsys: Capture) -> None:
    sizes = ["--num-microbatches", "8", "--equal-passes", *FEW]
    assert main(["compare", "--config", CONFIG, *sizes, "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["needed_layout"] for row in rows if row["placement"] == "linear"} == {None}
    assert {row["needed_layout"] for row in rows if row["placement"] == "vee"} == {"Et|(tt|)*14tL"}
    assert main(["plan", "--schedule", "zb-v", "--config", CONFIG, "--num-microbatches", "8", "--equal-passes"]) == 0
    assert "needs --pipeline-model-parallel-layout 'Et|(tt|)*14tL'" in capsys.readouterr().out


def test_one_search_over_both_placements_has_the_layers_of_each(capsys: Capture) -> None:
    """Its flags give the last rank fewer layers, but not the last stages of a V: neighbours there are no rank's."""
    sizes = ["--config", "configs/llama_8b.yaml", "--num-microbatches", "24", "--memory-limit", "1p"]
    lengths = {}
    for placement in ("linear", "vee", "auto"):
        assert main(["plan", "--schedule", "zb-auto", "--placement", placement, *sizes, "--format", "json"]) == 0
        lengths[placement] = json.loads(capsys.readouterr().out)["span_ms"]
    assert lengths["auto"] == pytest.approx(lengths["linear"], rel=0.005)
    assert lengths["linear"] < 0.97 * lengths["vee"]


def test_costs_of_two_stages_say_what_they_assume(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "costs.json"
    times: dict[str, object] = {name: [8.0, 10.0] for name in TIMES} | {"layers_per_stage": [4, 4]}
    plan = ["plan", "--schedule", "zb-v", "--equal-passes", "--num-ranks", "2", "--num-microbatches", "6"]
    for more, assumed in (({}, True), ({"embedding": {}}, True), ({"embedding": {"forward_ms": 1.0}}, False)):
        file.write_text(json.dumps(times | more))
        assert main([*plan, "--costs", str(file)]) == 0
        assert ("The embedding is assumed to take no time" in capsys.readouterr().out) == assumed
