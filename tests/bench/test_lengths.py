"""Simulated orders and balance of microbatches of different lengths: the bubbles that the documentation states."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.lengths import ON_DEMAND_ROWS, REPLICA_ROWS, OrderRow, on_demand_row, order_row, replica_row

DOCS = Path(__file__).parents[2] / "docs" / "uneven-replicas.md"


@pytest.mark.parametrize(
    ("row", "name", "most"),
    [
        (OrderRow(4, "RL", 16, None), "zb-v", 7.2),
        (OrderRow(8, "SFT long", 32, None), "zb-h1", 16.4),
        (OrderRow(4, "RL", 64, 16384), "1f1b", 13.9),
        (OrderRow(8, "RL", 64, 16384), "zb-v", 7.1),
        (OrderRow(8, "SFT long", 32, 65536), "zb-h1", 22.5),
    ],
)
def test_bubbles_are_those_of_a_good_order(row: OrderRow, name: str, most: float) -> None:
    """At most one point above what the better of two fixed orders takes in 60 iterations; here there are fewer."""
    found = order_row(row, name, batches=12)
    assert found["best"] <= most + 1.0 and found["balance"] <= most + 1.0, found
    assert found["best"] < found["random"] - 0.5


@pytest.mark.parametrize("row", [REPLICA_ROWS[0], REPLICA_ROWS[1]])
def test_the_documentation_states_the_gain_of_balanced_replicas(row: tuple[int, int, int, int]) -> None:
    replicas, ranks, each, longest = row
    gains = [replica_row(row, name) for name in ("zb-h1", "zb-v")]
    [line] = (
        line for line in DOCS.read_text().splitlines() if f"| {replicas} x {ranks} | {each} | {longest} |" in line
    )
    assert [float(cell.split()[0]) for cell in line.split("|")[4:6]] == gains


def test_replicas_that_wait_in_every_unit_take_longer() -> None:
    for row in ON_DEMAND_ROWS[1::3][:3]:
        ratios = on_demand_row(row, batches=8)
        assert ratios["padded"] > ratios["sorted"] > ratios["even"] > 1.0
