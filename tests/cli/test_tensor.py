"""``zero-bubble compare`` with tensor parallelism over the GPUs of replicas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.zero_bubble.__main__ import main

Capture = pytest.CaptureFixture[str]
CONFIG = Path(__file__).parents[2] / "configs/gpt_1.5b.yaml"
LAYERS, HIDDEN, TOKENS, BANDWIDTH = 22, 2304, 1024 * 6, 150
COMMON = f"compare --config {CONFIG} --gpu h100 --num-microbatches 4 --max-chunks 2 --equal-passes --shard-weights"


def table(capsys: Capture, words: str) -> dict[str, dict[str, float]]:
    assert main(f"{COMMON} {words} --format json".split()) == 0
    return {row["schedule"]: row for row in json.loads(capsys.readouterr().out)["rows"]}


def test_times_memory_and_traffic_by_hand(capsys: Capture) -> None:
    """On one rank, a schedule has no bubble: with t of 6 replicas, it runs t times the microbatches, each in 1/t of the
    time and four all-reduces per layer.
    """
    rows = table(capsys, f"--num-ranks 1 --replicas 6 --tensor-bandwidth {BANDWIDTH}")
    assert [name for name in rows if name.startswith("zb-h1 ")] == [f"zb-h1 tp{t}" for t in (2, 3, 6)]
    for t in (2, 3, 6):
        row, whole = rows[f"zb-h1 tp{t}"], rows["zb-h1"]
        sent = 4 * LAYERS * 2 * (t - 1) / t * 2 * TOKENS * HIDDEN * 4 * t
        assert row["tensor_parallel"] == t and row["tensor_bytes"] == pytest.approx(sent)
        assert row["makespan_ms"] == pytest.approx(whole["makespan_ms"] + sent / (BANDWIDTH * 1e6))
        assert row["peak_memory"] == pytest.approx(whole["peak_memory"] / t)
        parameters = 12 * LAYERS * HIDDEN**2 + 2 * 50_304 * HIDDEN
        replicas = 6 // t  # a distributed optimizer divides its 12 bytes, and gathers and reduces once
        assert row["static_bytes"] == pytest.approx(parameters / t * (6 + 12 / replicas))
        assert row["replica_bytes"] == pytest.approx(parameters / t * 6 * (replicas - 1) / replicas)
        assert whole["tensor_parallel"] is None


def test_same_table(capsys: Capture) -> None:
    """The text has them among the other rows; 24 heads cannot be divided by 16."""
    words = f"{COMMON} --num-ranks 3 --replicas 16 --tensor-bandwidth 150"
    assert main(words.split()) == 0
    out = capsys.readouterr().out
    assert "none of the all-reduces, at 150 GB/s, is hidden" in out
    assert "zb-v tp8" in out and "zero-pp x2 sharded" in out and "tp16" not in out
    assert out.count("got 24 for 16 GPUs") == 1


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("--shard-weights --tensor-bandwidth 1", "--tensor-bandwidth needs the shapes of a model"),
        ("--shard-weights --tensor-bandwidth 0", "--tensor-bandwidth must be above 0; got 0"),
        ("--tensor-bandwidth 1", "--tensor-bandwidth applies only to --shard-weights"),
    ],
)
def test_refused(capsys: Capture, words: str, what: str) -> None:
    times = "--num-ranks 2 --num-microbatches 2 --forward-ms 1 --backward-ms 1 --wgrad-ms 1"
    assert main(f"compare {times} {words}".split()) == 2
    assert what in capsys.readouterr().err
