"""Tests of the comparison with public schedules: the table is complete, and zb-auto is not worse on a sample."""

from __future__ import annotations

import pytest

from bench.peer_schedules import METRICS, PEERS, Case, answer, is_zb_v, lost, lost_by_zb_v, read, zb_v_bubble
from tests.helpers.rows import some

CASES = read(PEERS)
SOME = [case for case in CASES if (case.p, case.m) == (4, 12)][::6] + [c for c in CASES if (c.p, c.m) == (8, 16)][::18]


def test_table_has_every_peer() -> None:
    assert sum(map(len, CASES.values())) == 936


@pytest.mark.parametrize(
    "case", some(SOME, *SOME[::12]), ids=lambda case: f"{case.p}-{case.forward_ms:g}-{case.limit:g}"
)
def test_no_public_schedule_beats_zb_auto(case: Case) -> None:
    answers = {(case, metric): answer(case, metric) for metric in METRICS}
    assert not list(lost(CASES, answers))


@pytest.mark.parametrize("case", [c for c in SOME if any(map(is_zb_v, CASES[c]))], ids=lambda case: f"{case.p}")
def test_no_public_zb_v_beats_ours(case: Case) -> None:
    bubbles = {(case, metric): zb_v_bubble(case, metric) for metric in METRICS}
    assert not list(lost_by_zb_v(CASES, bubbles))
