"""Tests of the overlaps of tensor parallelism that are switched off."""

from __future__ import annotations

from types import SimpleNamespace

from megatron.zero_bubble.planning.job.overlaps import OVERLAPS, enabled_overlaps, switched_off


def test_all_enabled_overlaps_are_named_at_once() -> None:
    on = dict.fromkeys(OVERLAPS.values(), True)
    enabled = enabled_overlaps(SimpleNamespace(tp_comm_overlap=True, **on))
    assert switched_off(enabled) == (
        "tp_comm_bulk_wgrad and tp_comm_bulk_dgrad and tp_comm_overlap_ag are switched off, because W must not find "
        "its operands in the buffers of --tp-comm-overlap"
    )
    assert enabled_overlaps(SimpleNamespace(tp_comm_overlap=True, **on | {"tp_comm_bulk_wgrad": False})) == enabled[1:]
    assert not enabled_overlaps(SimpleNamespace(tp_comm_overlap=False, **on))
    assert not enabled_overlaps(SimpleNamespace(tp_comm_overlap=True, transformer_impl="local", **on))
