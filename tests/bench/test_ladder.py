"""Tests of the bench over the number of ranks: which growth of a bubble is a violation, and what it writes."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from fractions import Fraction
from pathlib import Path

import pytest

from bench.ladder import Ladder, Rung, profiles, violations_of
from bench.peer_schedules import Answer
from bench.ranks import environment

ROOT = Path(__file__).parents[2]
LADDER = Ladder("10/10/10/0/1", 2, Fraction(1, 2))


def rungs(*figures: tuple[float, float], ladder: Ladder = LADDER) -> list[Rung]:
    """Rungs for 4, 8, ... ranks with these bubbles and bounds."""
    return [Rung(ladder, 4 << k, Answer(*of, "vee", 2.0, 0.1)) for k, of in enumerate(figures)]


def found(*figures: tuple[float, float]) -> list[tuple[int, int, float]]:
    return [(v.low.num_ranks, v.high.num_ranks, round(v.excess, 6)) for v in violations_of(rungs(*figures))]


def test_half_a_point_of_growth_is_allowed_from_rung_to_rung_and_in_all() -> None:
    assert not found((0.1, 0.0), (0.104, 0.0), (0.104, 0.0))
    assert found((0.1, 0.0), (0.108, 0.0)) == [(4, 8, 0.008)]
    assert found((0.1, 0.0), (0.104, 0.0), (0.108, 0.0)) == [(4, 16, 0.008)]
    assert found((0.3, 0.0), (0.1, 0.0), (0.2, 0.0)) == [(8, 16, 0.1)]


def test_growth_of_the_bound_is_allowed_and_its_fall_is_not_charged() -> None:
    assert not found((0.1, 0.05), (0.15, 0.1))
    assert found((0.1, 0.05), (0.16, 0.1)) == [(4, 8, 0.01)]
    assert not found((0.1, 0.05), (0.1, 0.0))


def test_ladders_are_not_compared_with_each_other() -> None:
    other = Ladder(LADDER.profile, 4, LADDER.limit)
    assert not list(violations_of([*rungs((0.1, 0.0)), *rungs((0.9, 0.0), ladder=other)]))


def test_violation_names_the_ladder_and_all_figures() -> None:
    (violation,) = violations_of(rungs((0.1, 0.01), (0.13, 0.02)))
    assert str(violation) == (
        "10/10/10/0/1, m = 2p, limit 1/2 p, p = 4 to 8: bubble 10.00% to 13.00%, bound 1.00% to 2.00%, "
        "2.00 points beyond the bound's growth"
    )


def test_profiles_are_those_of_the_public_schedules() -> None:
    assert len(profiles()) == 8
    assert "18.5/18.1/9.3/0.6/0.4325" in profiles()
    assert LADDER.case(8).m == 16 and LADDER.case(8).limit == 4.0


def climb(output: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.ladder", "--jobs", "1", "--output", str(output), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)


@pytest.mark.full
@pytest.mark.parametrize(
    ("limits", "num_ranks"),
    [(["1/2", "1"], ["8", "16"]), (["1/3", "1/2", "3/4", "1"], ["8", "16", "32"])],
)
def test_the_search_is_steady_for_one_profile(tmp_path: Path, limits: list[str], num_ranks: list[str]) -> None:
    sizes = ["--num-ranks", *num_ranks, "--multiples", "4", "--limits", *limits]
    result = climb(tmp_path / "ladder.json", "--profiles", "29.7/29.4/19.9/0.53/0.4325", *sizes)
    assert result.returncode == 0, result.stdout + result.stderr
    plans = len(limits) * len(num_ranks)
    assert f"0 violations on {len(limits)} ladders with {plans} plans" in result.stdout


def test_limits_without_a_schedule_are_left_out(tmp_path: Path) -> None:
    output = tmp_path / "ladder.json"
    sizes = ["--num-ranks", "4", "8", "--multiples", "2", "--limits", "1/8", "1"]
    result = climb(output, "--profiles", "10/10/10/0/1", *sizes)
    assert result.returncode == 0, result.stdout + result.stderr
    rungs_written = [(rung["limit"], rung["num_ranks"]) for rung in json.loads(output.read_text())["rungs"]]
    assert rungs_written == [("1/8", 8), ("1", 4), ("1", 8)]
    lines = ElementTree.parse(output.with_suffix(".svg")).findall(".//{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 2 * 2
