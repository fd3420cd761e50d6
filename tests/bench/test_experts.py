"""The simulated lengths of schedules for a model with experts, against an independent simulator of their all-to-alls.

That simulator runs the parts of every pass on two lanes per rank and shares no code with the package; the shares of
zb-v and dualpipe-v over the combined schedule are those that it gave for other sizes.
"""

from __future__ import annotations

import pytest

from bench.experts import ROWS, STOCK, costs_file, shares, table
from tests.helpers.rows import some

LENGTHS = {
    "stock 1F1B, no overlap": ([17528, 14839, 11660, 10071], 16),
    "zb-h1, no overlap": ([16681, 13992, 10813, 9223], 16),
    "zb-v, no overlap": ([15330, 12931, 10068, 8637], 16),
    "zb-v, W beneath its own B's all-to-all": ([14323, 11924, 9656, 8729], 16),
    "stock combined interleaved v=2": ([10078, 9530, 9035, 8850], 24),
    "stock combined interleaved v=4": ([9677, 9128, 8611, 8416], 20),
    "  the same, backwards alone split": ([9682, 9228, 8666, 8387], 20),
    "1f1b, pairs, warm-up 2(p-r)-1": ([11253, 10536, 9833, 9513], 32),
    "dualpipe-v, pairs": ([10852, 10154, 9353, 8943], 16.5),
}
"""Milliseconds of 64 microbatches on 16 ranks of 4 layers, by share of the all-to-all, and the peak in microbatches."""
RELATIVE = {
    (8, 32, 8): {"zb-v, no overlap": (52, 36, 11, -3), "dualpipe-v, pairs": (7, 6, 3, 1)},
    (8, 64, 8): {"dualpipe-v, pairs": (4, 3, 2, 0)},
    (16, 32, 4): {"dualpipe-v, pairs": (13, 11, 6, 2), "stock combined interleaved v=4": (-7, -7, -8, -9)},
}
"""Percent by which rows are longer than the combined interleaved schedule with two stages per rank."""


def test_all_to_alls_take_the_shares_of_the_columns() -> None:
    assert [round(share, 2) for share in shares()] == [0.52, 0.43, 0.28, 0.16]


@pytest.mark.full
def test_lengths_are_those_of_the_independent_simulator() -> None:
    found = {title: (lengths, peak) for title, lengths, peak in table(16, 64, 4)}
    assert found.keys() == LENGTHS.keys()
    for title, (lengths, peak) in LENGTHS.items():
        assert found[title][0] == pytest.approx(lengths, rel=0.01), title
        assert found[title][1] == peak


def test_the_first_column_of_these_lengths() -> None:
    """The rows without overlap are exact: their passes take the sums of their parts."""
    file = costs_file(None, 4)
    for row in ROWS:
        length, peak = row.length(file, 16, 64)
        lengths, peaks = LENGTHS[row.title]
        assert length == pytest.approx(lengths[0], rel=0.0001 if "no overlap" in row.title else 0.01), row.title
        assert peak == peaks


@pytest.mark.parametrize(("num_ranks", "num_microbatches", "layers"), some(RELATIVE, (8, 32, 8)))
def test_differences_of_other_sizes(num_ranks: int, num_microbatches: int, layers: int) -> None:
    found = {title: lengths for title, lengths, _ in table(num_ranks, num_microbatches, layers)}
    for title, percents in RELATIVE[num_ranks, num_microbatches, layers].items():
        longer = [100 * (ms / of - 1) for ms, of in zip(found[title], found[STOCK], strict=True)]
        assert longer == pytest.approx(percents, abs=2), title
