"""ZB-Interleaved compared with torch's interleaved zero bubble and other schedules without a bubble, at F = B = W."""

from __future__ import annotations

import pytest

from megatron.zero_bubble import PassCosts, Schedule, build, simulate
from megatron.zero_bubble.core.formats.torch_csv import schedule_from_csv
from tests.helpers.rows import some
from tests.helpers.torch_orders import csv_of_torch

TORCHS = "ScheduleInterleavedZeroBubble"
SIZES = [(p, times * p, v) for p in (4, 8, 16) for times in (1, 2, 4) for v in (2, 3, 4)]


def lengths(schedule: Schedule) -> tuple[float, float]:
    """Span and makespan in units of a pass of a rank's whole share."""
    timeline = simulate(schedule, PassCosts.uniform(schedule.placement, 1.0, 1.0, 1.0))
    return timeline.span_ms, timeline.makespan_ms


@pytest.mark.parametrize(("p", "m", "v"), some(SIZES, *((p, m, v) for p, m, v in SIZES if p < 16 and m <= 16)))
def test_never_longer_than_its_peers(p: int, m: int, v: int) -> None:
    sizes = {"num_ranks": p, "num_microbatches": m}
    own = lengths(build("zb-interleaved", **sizes, num_chunks=v))
    peers = {
        TORCHS: schedule_from_csv(csv_of_torch(TORCHS, p, m, v), TORCHS),
        "gis": build("gis", **sizes, num_chunks=v),
        "interleaved-1f1b": build("interleaved-1f1b", **sizes, num_chunks=v),
        "zb-v": build("zb-v", **sizes),
    }
    for name, peer in peers.items():
        theirs = lengths(peer)
        assert own[0] <= theirs[0] + 1e-9 and own[1] <= theirs[1] + 1e-9, (name, own, theirs)
