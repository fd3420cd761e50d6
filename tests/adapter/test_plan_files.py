"""A plan's file alone runs what ``zero-bubble plan`` promised: sharding, collectives, and the bits of spelled flags."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.zero_bubble.__main__ import main
from tests.adapter.test_shards import BASE, TWO, train
from tests.helpers.parity import assert_same_bits
from tests.helpers.ranks import RankPool

TIMES = "--forward-ms 4 --backward-ms 5 --wgrad-ms 3 --gather-ms 1 --reduce-ms 1 --replicas 2"
SIZE = "--num-ranks 2 --num-microbatches 4 --num-chunks 2"


def test_planned_sharding_runs_from_the_file_alone(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The planned numbers of whole stages, and the units of zero-pp, are not the defaults of a job."""
    spelled, alone, plans = [], [], []
    for name, units in (
        ("zero-pp", "--unit-microbatches 4 --whole-stages 1"),
        ("interleaved-1f1b", "--whole-stages 1"),
    ):
        assert main(f"plan --schedule {name} {SIZE} {TIMES} --shard-weights {units} --format json".split()) == 0
        file = tmp_path / f"{name}.json"
        file.write_text(capsys.readouterr().out)
        plans.append(json.loads(file.read_text()))
        spelled.append(f"{name} --zero-bubble-shard-weights {units.replace('--', '--zero-bubble-')}")
        alone.append(f"--zero-bubble-schedule {file}")
    runs = [run for pair in zip(spelled, alone, strict=True) for run in pair]
    results = ranks.run(TWO.num_ranks, train, TWO.flags(4, f"{BASE} --eval-iters 0 --train-iters 3"), runs, timeout=200)
    for first, plan in zip((0, 2), plans, strict=True):
        pairs = [of_rank[first : first + 2] for of_rank in results]
        assert_same_bits([[trained.outcome for trained in pair] for pair in pairs], runs[first : first + 2])
        for rank, pair in enumerate(pairs):
            of_pipeline = rank // TWO.data
            for trained in pair:
                assert trained.gathers == plan["gathers"][of_pipeline]
                assert trained.reductions == plan["reductions"][of_pipeline]
