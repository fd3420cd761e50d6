"""Measured iterations of vocabulary parallelism, predicted from the measured times of their passes."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from megatron.zero_bubble import PassCosts, PassMemory, Placement, build, simulate
from megatron.zero_bubble.formats.costs import CostsFile, read_costs_file
from megatron.zero_bubble.search.vocabulary import with_vocabulary

PUBLISHED = Path(__file__).parents[2] / "configs" / "published"
_LINES = (PUBLISHED / "vocabulary_a100.csv").read_text(encoding="utf-8").splitlines()
ROWS = {row["name"]: row for row in csv.DictReader(line for line in _LINES if not line.startswith("#"))}
EVEN = PassCosts.uniform(Placement.linear(8), 1.0, 1.0, 1.0)


def file_of(name: str) -> CostsFile:
    return read_costs_file(PUBLISHED / "vocabulary_a100" / f"{name}.json")


def test_every_costs_file_has_a_measured_iteration() -> None:
    assert sorted(ROWS) == sorted(path.stem for path in (PUBLISHED / "vocabulary_a100").iterdir())


@pytest.mark.parametrize("name", ROWS)
def test_measured_iteration_is_predicted_within_one_and_a_half_percent(name: str) -> None:
    """With vocabulary passes, 1F1B has the order of equal passes, and T comes half a period after its barrier, so that
    it does not wait for it.
    """
    schedule = build("1f1b", num_ranks=8, num_microbatches=int(ROWS[name]["microbatches"]))
    costs, _ = file_of(name).on(schedule.placement)
    assert (costs.vocabulary is not None) == name.startswith("vocabulary")
    if costs.vocabulary is not None:
        schedule = with_vocabulary(schedule, EVEN, 1 if name.startswith("vocabulary_1") else 2, lag=0.5)
    predicted = simulate(schedule, costs, PassMemory.uniform(schedule.placement)).makespan_ms
    assert predicted == pytest.approx(float(ROWS[name]["measured_ms"]), rel=0.015)
