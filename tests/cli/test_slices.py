"""Slices of sequences in ``plan`` and ``compare``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.zero_bubble.__main__ import main
from tests.cli.test_plan_and_compare import Capture, run, run_json

SIZES = "--num-ranks 4 --num-microbatches 4".split()
TIMES = "--forward-ms 1 --backward-ms 1.4 --wgrad-ms 0.6 --attention-share 0.4".split()
PLAN = ["plan", "--schedule", "seq-zb-h1", *SIZES]
CONFIG = str(Path(__file__).parents[2] / "configs/gpt_6.2b.yaml")


def test_plan_cuts_into_four_slices_by_default_and_balances_them_for_attention(capsys: Capture) -> None:
    plain = run_json(capsys, *PLAN, *"--forward-ms 1 --backward-ms 1 --wgrad-ms 1".split())
    assert plain["num_slices"] == 4
    assert "slice_shares" not in plain
    shares = run_json(capsys, *PLAN, *TIMES)["slice_shares"]
    assert len(shares) == 4
    assert shares == sorted(shares, reverse=True)
    even = run_json(capsys, *PLAN, *TIMES, "--slice-cuts", "even", "--num-slices", "4")
    assert "slice_shares" not in even
    assert run_json(capsys, *PLAN, *TIMES)["makespan_ms"] < even["makespan_ms"]


def test_plan_uses_given_ends(capsys: Capture) -> None:
    plan = run_json(capsys, *PLAN, *TIMES, "--slice-cuts", "0.5,0.75,1")
    assert plan["slice_shares"] == [0.5, 0.25, 0.25]


def test_text_states_the_slices_and_bounds_them(capsys: Capture) -> None:
    out = run(capsys, *PLAN, *TIMES, "--num-slices", "2", "--memory-limit", "1p")
    assert "seq-zb-h1: 4 ranks, 4 microbatches of 2 slices, " in out
    assert "for this placement, limit and cuts (" in out
    assert "no schedule with this placement, limit and cuts can be more than" in out


def test_auto_takes_the_shortest_within_the_limit(capsys: Capture) -> None:
    auto = [*PLAN, *TIMES, "--num-slices", "auto"]
    free = run_json(capsys, *auto)
    others = {
        (number, cuts): run_json(capsys, *PLAN, *TIMES, "--num-slices", number, "--slice-cuts", cuts)
        for number in ("1", "2", "4", "8", "16")
        for cuts in ("even", "balanced")
    }
    assert free["makespan_ms"] == min(plan["makespan_ms"] for plan in others.values())
    assert free["num_slices"] == 16
    # Balanced slices are the shortest, but the first of them are long, so that only even ones fit.
    limit = max(others["16", "even"]["peak_activation"]) / 4
    tight = run_json(capsys, *auto, "--memory-limit", f"{limit}p")
    assert "slice_shares" not in tight
    assert tight["num_slices"] == 16


def test_auto_leaves_slices_a_number_of_tokens(capsys: Capture) -> None:
    """The sequences of the configuration have 1024 tokens."""
    auto = ["plan", "--schedule", "seq-zb-h1", "--config", CONFIG, "--num-slices", "auto"]
    assert "num_slices" not in run_json(capsys, *auto)
    assert run_json(capsys, *auto, "--min-slice-tokens", "200", "--slice-cuts", "even")["num_slices"] == 4
    # Balanced slices differ in length, and the shortest of four has less than a quarter of the tokens.
    assert run_json(capsys, *auto, "--min-slice-tokens", "256", "--slice-cuts", "even")["num_slices"] == 4
    assert run_json(capsys, *auto, "--min-slice-tokens", "256", "--slice-cuts", "balanced")["num_slices"] == 2


def test_auto_leaves_slices_the_tokens_that_a_run_has_measured(capsys: Capture, tmp_path: Path) -> None:
    def auto(*flags: str, **tokens: int) -> int:
        file = tmp_path / "costs.json"
        file.write_text(json.dumps({"forward_ms": 1, "backward_ms": 1, "wgrad_ms": 1} | tokens))
        command = ["plan", "--schedule", "seq-zb-h1", *SIZES, "--costs", str(file), "--num-slices", "auto", *flags]
        return int(run_json(capsys, *command).get("num_slices", 1))

    assert auto() == 16
    assert auto(sequence_length=4096) == 4, "1024 tokens by default"
    assert auto(sequence_length=4096, least_slice_tokens=512) == 8
    assert auto(sequence_length=4096, least_slice_tokens=4096) == 1
    assert auto("--min-slice-tokens", "2048", sequence_length=4096, least_slice_tokens=512) == 2
    assert auto("--min-slice-tokens", "256", sequence_length=4096, least_slice_tokens=512) == 16


def test_zb_auto_is_never_longer_than_the_known_schedules_of_its_slices(capsys: Capture) -> None:
    for placement in ("linear", "vee", "auto"):
        auto = ["plan", "--schedule", "zb-auto", *SIZES, *TIMES, "--placement", placement, "--num-slices", "4"]
        found = run_json(capsys, *auto, "--objective", "makespan", "--memory-limit", "0.6p")
        assert found["num_slices"] == 4
        assert max(found["peak_activation"]) <= 2.4
        assert found["lower_bound_ms"] <= found["makespan_ms"] <= run_json(capsys, *PLAN, *TIMES)["makespan_ms"]
        assert found["gap"] < {"linear": 0.1}.get(placement, 0.05)


def test_zb_auto_chooses_a_number_of_slices(capsys: Capture) -> None:
    """Without attention, slices on a V reach the bound; of equal schedules, the one with fewest slices is taken."""
    times = "--forward-ms 1 --backward-ms 1 --wgrad-ms 1 --memory-limit 1p --objective span".split()
    auto = ["plan", "--schedule", "zb-auto", *SIZES, *times]
    assert "num_slices" not in run_json(capsys, *auto)
    chosen = run_json(capsys, *auto, "--num-slices", "auto")
    assert chosen["bubble_rate_span"] == pytest.approx(0, abs=1e-9)
    fewer = run_json(capsys, *auto, "--num-slices", str(chosen["num_slices"] // 2))
    assert fewer["bubble_rate_span"] > 1e-6
    assert main([*auto, "--num-slices", "auto", "--memory-limit", "0.1p"]) == 2
    assert "the memory limit admits no schedule" in capsys.readouterr().err


def test_compare_shows_slices_only_if_asked(capsys: Capture) -> None:
    table = run_json(capsys, "compare", *SIZES, *TIMES, "--max-chunks", "2", "--equal-passes")
    assert not any(row["schedule"].startswith("seq-") for row in table["rows"])
    assert table["sliced_lower_bound_ms"] == {}
    command = ["compare", *SIZES, *TIMES, "--max-chunks", "2", "--equal-passes", "--num-slices", "8"]
    sliced = run_json(capsys, *command)
    cut = [row for row in sliced["rows"] if row["num_slices"] > 1]
    rows = {row["schedule"]: row for row in cut}
    assert rows.keys() >= {"seq-1f1b n8", "seq-zb-h1 n8", "seq-interleaved-1f1b x2 n8", "zb-auto n8"}
    assert [row for row in sliced["rows"] if row["num_slices"] == 1] == table["rows"]
    assert rows["seq-1f1b n8"]["messages"] == 8 * next(r for r in table["rows"] if r["schedule"] == "1f1b")["messages"]
    for placement, bound in sliced["sliced_lower_bound_ms"].items():
        assert bound <= min(row["makespan_ms"] for row in cut if row["placement"] == placement) * (1 + 1e-9)
    assert sliced["sliced_lower_bound_ms"].keys() == {"linear", "vee"}
    text = run(capsys, *command)
    assert "no linear schedule of whole sequences within the limit has a makespan below" in text
    assert "no linear schedule of these slices within the limit has a makespan below" in text
    header, *lines = text.splitlines()[1 : 2 + len(sliced["rows"])]
    assert {line.rindex("%") for line in lines if not line.endswith("limit")} == {len(header) - 1}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-slices 0", "--num-slices must be a number from 1 to 4096, or auto; got 0"),
        ("--num-slices x", "--num-slices must be a number from 1 to 4096, or auto; got x"),
        ("--slice-cuts even", "--slice-cuts even needs a number of slices; add --num-slices"),
        ("--slice-cuts 0.5,0.2,1", "increasing shares of the sequence, of which the last is 1, such as 0.3,0.6,1; got"),
        ("--slice-cuts 0.5,0.9", "of which the last is 1"),
        ("--slice-cuts nan,1", "of which the last is 1"),
        ("--slice-cuts 0.5,1 --num-slices 3", "--slice-cuts 0.5,1 has 2 ends; got --num-slices 3; leave out"),
        ("--num-slices 2 --min-slice-tokens 9", "--min-slice-tokens applies only to --num-slices auto"),
        ("--num-slices auto --min-slice-tokens 9", "the length of a sequence, which only --config or a costs file"),
        ("--num-slices auto --min-slice-tokens 0", "--min-slice-tokens must be 1 or more; got 0"),
        ("--schedule zb-v --num-slices 2", "schedule 'zb-v' does not cut sequences into slices; got 2 slices"),
        ("--schedule zb-v --num-slices auto", "schedule 'zb-v' does not cut sequences into slices; got 16 slices"),
    ],
)
def test_flags_that_cannot_work_are_refused(flags: str, message: str, capsys: Capture) -> None:
    assert main([*PLAN, *TIMES, *flags.split()]) == 2
    assert message in capsys.readouterr().err


def test_more_slices_than_tokens_are_refused(capsys: Capture) -> None:
    command = ["plan", "--schedule", "seq-1f1b", "--config", CONFIG, "--num-slices", "2049"]
    assert main(command) == 2
    assert "a sequence of 1024 tokens has at most 1024 slices of 1 tokens each; got 2049" in capsys.readouterr().err


def test_attention_share_is_a_share_and_goes_with_times(capsys: Capture) -> None:
    assert main([*PLAN, *TIMES, "--attention-share", "1.5"]) == 2
    assert "--attention-share is a share, so it must be between 0 and 1; got 1.5" in capsys.readouterr().err
    assert main(["plan", "--schedule", "seq-1f1b", "--config", CONFIG, "--attention-share", "0.5"]) == 2
    assert "leave out --attention-share" in capsys.readouterr().err
