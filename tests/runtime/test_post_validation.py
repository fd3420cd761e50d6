"""Steps taken ahead: losses, norms, weights and optimizer states of the synchronous optimizer, bit for bit.

Faults are put into the gradient of a norm's weight of one microbatch, on one rank, in chosen iterations.
"""

from __future__ import annotations

import pytest

from tests.helpers.faults import Fault, train_with_faults
from tests.helpers.parity import Layout, assert_same_bits
from tests.helpers.ranks import RankPool

AHEAD = "--zero-bubble-post-validation"


def both(
    ranks: RankPool, layout: Layout, count: int, schedule: str, options: str, faults: list[Fault], steps: int = 12
):
    flags = f"{layout.flags(count, options)} --zero-bubble-schedule {schedule} --train-iters {steps} --eval-interval 5"
    results = [
        ranks.run(layout.num_ranks, train_with_faults, f"{flags} {mode}", faults, timeout=120) for mode in ("", AHEAD)
    ]
    together = [[first[0], second[0]] for first, second in zip(*results, strict=True)]
    assert_same_bits(together, [schedule, f"{schedule} ahead"], steps)
    counts = [second[1] for second in results[1]]
    return counts


def test_plain(ranks: RankPool) -> None:
    counts = both(ranks, Layout(2), 3, "zb-h2", "--clip-grad 1000", [])
    print(counts)
    counts = both(
        ranks,
        Layout(2),
        3,
        "zb-h2",
        "--clip-grad 1000",
        [Fault(5, 1, 1, 1e9), Fault(8, 0, 0, 1e9), Fault(10, 1, 0, 1e9)],
    )
    print(counts)
