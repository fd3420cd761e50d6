"""A rank dies while weights and gradients are shards: all others end, with a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.pretrain.test_faults import check_survivors, flags
from tests.helpers.launch import Death, run_training
from tests.helpers.parity import Layout

OPS = "megatron.zero_bubble.integration.adapter.shards:DistributedChunk"


@pytest.mark.full
@pytest.mark.parametrize("call", [f"{OPS}.gather", f"{OPS}.reduce"])
def test_killed_replica_ends_the_run(tmp_path: Path, call: str) -> None:
    """Rank 3 is replica 1 of the second stage of the pipeline: rank 2 waits for it, and ranks 0 and 1 for both."""
    more = "--use-distributed-optimizer --num-virtual-stages-per-pipeline-rank 2 --zero-bubble-shard-weights"
    layout = Layout(2, data=2, num_layers=4)
    words = flags(layout, 4, *more.split(), schedule="zero-pp")
    check_survivors(run_training(4, words, tmp_path, Death(3, call, call=7)), 3)
