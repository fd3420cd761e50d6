"""``zero-bubble plan --layout auto``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.zero_bubble import Placement
from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.core.formats.layout import stage_layers
from tests.cli.test_plan_and_compare import CONFIGS, SIZES, TIMES, run, run_json

Capture = pytest.CaptureFixture[str]
LLAMA = ["--config", str(CONFIGS / "llama_8b.yaml"), "--num-microbatches", "16", "--layout", "auto"]
FILE = {
    "layers": ["dense*2", "moe*9"],
    "parts": {
        "dense": {"forward_ms": 1, "backward_ms": 1.2, "wgrad_ms": 0.8},
        "moe": {"forward_ms": 2, "backward_ms": 2.2, "wgrad_ms": 1.5},
        "loss": {"forward_ms": 3, "backward_ms": 3, "wgrad_ms": 3},
    },
}


pytestmark = pytest.mark.usefixtures("short_searches")


@pytest.fixture
def costs(tmp_path: Path) -> list[str]:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(FILE))
    return ["--costs", str(file), *SIZES]


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "interleaved-1f1b", "zb-auto"])
def test_the_layout_of_a_model_is_printed_for_megatron(capsys: Capture, schedule: str) -> None:
    plan = run_json(capsys, "plan", "--schedule", schedule, *LLAMA)
    placement = Placement(tuple(plan["stage_to_rank"]))
    layout = plan["pipeline_model_parallel_layout"]
    assert list(stage_layers(placement, 32, layout)) == plan["layers_per_stage"]
    assert plan["shorter_than"]["even_split"] > 0.05, "the output layer is as long as some layers"
    assert all(gain >= -1e-9 for gain in plan["shorter_than"].values())
    if schedule != "zb-h1":
        return
    text = run(capsys, "plan", "--schedule", schedule, *LLAMA)
    assert f"--pipeline-model-parallel-layout '{layout}'\nlayers by stage: " in text
    assert f"{plan['shorter_than']['even_split']:.2%} shorter than the even split (" in text
    assert "Layers by rank" not in text, "that is the even split's"


def test_the_weights_are_those_of_the_layout(capsys: Capture) -> None:
    """Embedding and output layer are equally large; the ranks differ by their layers."""
    text = run(capsys, "plan", "--schedule", "zb-h1", *LLAMA)
    layers = run_json(capsys, "plan", "--schedule", "zb-h1", *LLAMA)["layers_per_stage"]
    line = next(line for line in text.splitlines() if line.startswith("GiB by rank, weights"))
    weights = [float(amount) for amount in line.split(": ")[1].split()]
    assert layers[1] > layers[2] and layers[0] > layers[3]
    one = (weights[1] - weights[2]) / (layers[1] - layers[2])
    assert one > 1, "GiB per layer"
    assert weights[0] - weights[3] == pytest.approx(one * (layers[0] - layers[3]), abs=0.35)


def test_layers_of_several_kinds(capsys: Capture, costs: list[str]) -> None:
    even = run_json(capsys, "plan", "--schedule", "zb-h1", *costs)
    plan = run_json(capsys, "plan", "--schedule", "zb-h1", *costs, "--layout", "auto")
    assert "pipeline_model_parallel_layout" not in even
    assert sum(plan["layers_per_stage"]) == 11 and plan["makespan_ms"] < even["makespan_ms"]
    assert plan["shorter_than"]["even_split"] == pytest.approx(1 - plan["makespan_ms"] / even["makespan_ms"])


def test_zb_auto_plans_layout_and_placement_within_the_limit(capsys: Capture, costs: list[str]) -> None:
    flags = ["plan", "--schedule", "zb-auto", *costs, "--layout", "auto", "--memory-limit", "0.8p"]
    both = run_json(capsys, *flags)
    one = [run_json(capsys, *flags, "--placement", placement) for placement in ("linear", "vee")]
    assert both["makespan_ms"] == pytest.approx(min(plan["makespan_ms"] for plan in one))
    assert [len(plan["layers_per_stage"]) for plan in one] == [4, 8]
    assert "met, peak" in run(capsys, *flags)
    assert both["gap"] >= -1e-9


def test_a_schedule_file_gets_a_layout_for_its_order(capsys: Capture, costs: list[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(run(capsys, "plan", "--schedule", "zb-h1", *costs, "--format", "json"))
    plan = run_json(capsys, "plan", "--schedule-file", str(file), *costs, "--layout", "auto")
    by_name = run_json(capsys, "plan", "--schedule", "zb-h1", *costs, "--layout", "auto")
    assert (plan["makespan_ms"], plan["layers_per_stage"]) == (by_name["makespan_ms"], by_name["layers_per_stage"])


def test_slices_and_layouts_together(capsys: Capture) -> None:
    plan = run_json(capsys, "plan", "--schedule", "seq-zb-h1", "--num-slices", "2", *LLAMA)
    assert plan["shorter_than"]["even_split"] > 0.05 and plan["num_slices"] == 2


def test_compare_has_rows_for_layouts_beside_the_even_split_and_a_divided_vocabulary(
    capsys: Capture, costs: list[str]
) -> None:
    flags = ["compare", *costs[:2], "--num-ranks", "2", "--num-microbatches", "4", "--placement", "linear"]
    flags += ["--max-chunks", "1", "--equal-passes", "--memory-limit", "2p", "--layout", "auto"]
    table = run_json(capsys, *flags)
    rows = {row["schedule"]: row for row in table["rows"]}
    laid_out = [name for name, row in rows.items() if row["layout"] is not None]
    assert {"1f1b (layout by cost)", "zb-v (layout by cost)", "zb-auto (layout by cost)"} <= set(laid_out)
    for name in laid_out:
        plain = rows[name.removesuffix(" (layout by cost)")]
        assert plain["layout"] is None and rows[name]["makespan_ms"] <= plain["makespan_ms"] * (1 + 1e-9)
        for algorithm in (1, 2):
            assert rows[f"{plain['schedule']} (vocabulary {algorithm})"]["vocabulary"] == algorithm
    flags_of_plan = ["plan", "--schedule", "zb-h1", *costs[:2], "--num-ranks", "2", "--num-microbatches", "4"]
    plan = run_json(capsys, *flags_of_plan, "--layout", "auto")
    row = rows["zb-h1 (layout by cost)"]
    assert (row["layout"], row["makespan_ms"]) == (plan["pipeline_model_parallel_layout"], plan["makespan_ms"])
    best = min(
        (rows[name] for name in laid_out if rows[name]["within_limit"]), key=lambda row: float(row["makespan_ms"])
    )
    divided = min(row["makespan_ms"] for row in rows.values() if row["vocabulary"] and row["within_limit"])
    assert table["gain_of_vocabulary"] == pytest.approx(1 - divided / best["makespan_ms"])
    text = run(capsys, *flags)
    assert f"--pipeline-model-parallel-layout '{row['layout']}': " in text
    assert f"best layout: '{best['layout']}' with {best['schedule']}, {best['makespan_ms']:.3f} ms" in text
    assert f"{abs(table['gain_of_vocabulary']):.2%}" in text.split("vocabulary parallelism, ")[1].splitlines()[0]
    assert "of equally many layers per stage within the limit" in text
    without = run_json(capsys, *flags, "--vocabulary", "off")
    assert without["gain_of_vocabulary"] is None and not any(row["vocabulary"] for row in without["rows"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([*SIZES, *TIMES], "a layout by cost needs costs per layer; got those of whole ranks or stages"),
        (
            ["costs", "--activation-memory", "3"],
            "with --layout auto, --costs gives the memory of all layers; leave out",
        ),
        (["costs", "--num-ranks", "20"], "11 layers with embedding and loss do not fill 20 pipeline stages"),
    ],
)
def test_missing_costs_and_layers_are_reported(
    capsys: Capture, costs: list[str], flags: list[str], message: str
) -> None:
    own = [*costs, *flags[1:]] if flags[0] == "costs" else flags
    assert main(["plan", "--schedule", "zb-h1", "--layout", "auto", *own]) == 2
    assert message in capsys.readouterr().err


def test_parts_that_take_no_time_are_planned(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    layer, loss = (dict.fromkeys(("forward_ms", "backward_ms", "wgrad_ms"), ms) for ms in (0, 1))
    file.write_text(json.dumps({"layers": ["a*8"], "parts": {"a": layer, "loss": loss}}))
    plan = run_json(capsys, "plan", "--schedule", "zb-h1", "--layout", "auto", "--costs", str(file), *SIZES)
    assert set(plan["shorter_than"].values()) == {0.0}
