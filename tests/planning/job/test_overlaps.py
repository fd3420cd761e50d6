"""Overlaps of tensor parallelism are refused together, with all flags that disable them."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.planning.job.overlaps import OVERLAPS, check_overlaps


def test_all_enabled_overlaps_are_named_at_once() -> None:
    with pytest.raises(UserError) as caught:
        check_overlaps(lambda name, default: True)
    assert str(caught.value).endswith(
        "got tp_comm_bulk_wgrad=True, tp_comm_bulk_dgrad=True, tp_comm_overlap_ag=True; set them to False "
        "(--disable-tp-comm-bulk-wgrad --disable-tp-comm-bulk-dgrad --disable-tp-comm-overlap-ag)"
    )
    with pytest.raises(
        UserError, match=r"got tp_comm_overlap_ag=True; set it to False \(--disable-tp-comm-overlap-ag\)$"
    ):
        check_overlaps(lambda name, default: OVERLAPS[name] == "tp_comm_overlap_ag")
    check_overlaps(lambda name, default: default)
