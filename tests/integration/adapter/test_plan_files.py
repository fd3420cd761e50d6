"""A plan's file alone runs what ``zero-bubble plan`` promised: sharding, collectives, and the bits of spelled flags."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.zero_bubble.__main__ import main
from tests.helpers.parity import assert_same_bits
from tests.helpers.ranks import RankPool
from tests.integration.adapter.test_shards import BASE, TWO, train

TIMES = "--forward-ms 4 --backward-ms 5 --wgrad-ms 3 --gather-ms 1 --reduce-ms 1 --replicas 2"
STEPS = 3
SIZE = "--num-ranks 2 --num-microbatches 4 --num-chunks 2"


@pytest.mark.parametrize(
    ("name", "units"),
    [
        ("zero-pp", "--unit-microbatches 4 --whole-stages 1"),
        pytest.param("interleaved-1f1b", "--whole-stages 1", marks=pytest.mark.full),
    ],
)
def test_planned_sharding_runs_from_the_file_alone(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, units: str
) -> None:
    """The planned number of whole stages, and the units of zero-pp, are not the defaults of a job."""
    assert main(f"plan --schedule {name} {SIZE} {TIMES} --shard-weights {units} --format json".split()) == 0
    file = tmp_path / "plan.json"
    file.write_text(capsys.readouterr().out)
    plan = json.loads(file.read_text())
    spelled = f"{name} --zero-bubble-shard-weights {units.replace('--', '--zero-bubble-')}"
    runs, flags = [spelled, f"--zero-bubble-schedule {file}"], f"{BASE} --eval-iters 0 --train-iters {STEPS}"
    results = ranks.run(TWO.num_ranks, train, TWO.flags(4, flags), runs, timeout=200)
    assert_same_bits([[trained.outcome for trained in of_rank] for of_rank in results], runs, STEPS)
    for rank, of_rank in enumerate(results):
        for trained in of_rank:
            assert trained.gathers == plan["gathers"][rank // TWO.data]
            assert trained.reductions == plan["reductions"][rank // TWO.data]
