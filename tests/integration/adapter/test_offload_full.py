"""Offloading changes no bit: more schedules, options and ranks, compared with stock 1F1B too."""

from __future__ import annotations

import pytest

from tests.helpers.parity import Layout, assert_same_bits
from tests.helpers.ranks import RankPool
from tests.integration.adapter.test_offload import ALL, CHUNKS, HALF, LARGE, train
from tests.integration.adapter.test_parity import EXPERTS

DISTRIBUTED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
ROWS = {
    "zb-h1, p=4": ("zb-h1", Layout(4), 8, ""),
    "zb-h2, p=4, dropout": ("zb-h2", Layout(4), 8, "--attention-dropout 0.1 --hidden-dropout 0.1"),
    "zb-v, p=4, bf16": ("zb-v", Layout(4, num_layers=8), 8, "--bf16"),
    "zb-v, p=4, selective recompute": ("zb-v", Layout(4, num_layers=8), 8, "--recompute-granularity selective"),
    "interleaved, p=4, bf16": ("interleaved-1f1b", Layout(4, num_layers=8), 8, f"--bf16 {CHUNKS}"),
    "zb-h1, tp=2, sequence parallel": ("zb-h1", Layout(2, tensor=2), 4, "--sequence-parallel"),
    "zb-h1, dp=2, distributed optimizer, both overlaps": ("zb-h1", Layout(2, data=2), 4, f"--bf16 {DISTRIBUTED}"),
    "zb-h1, experts": ("zb-h1", Layout(2), 6, EXPERTS),
}
QUICK = ("zb-h1, dp=2, distributed optimizer, both overlaps",)
CHUNKED = ("zb-v", "interleaved-1f1b", "gis", "gis-h", "pipe-offload")
SCHEDULES = ("1f1b", "zb-h1", "zb-h2", *CHUNKED)
OPTIONS = {
    "fp32": "",
    "bf16": "--bf16",
    "dropout": "--attention-dropout 0.1 --hidden-dropout 0.1",
    "full recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "selective recompute": "--recompute-granularity selective",
    "experts": EXPERTS,
    "tensor and sequence parallel": "--sequence-parallel",
    "distributed optimizer": f"--bf16 {DISTRIBUTED}",
    "vocabulary": "--zero-bubble-vocabulary-parallel 2",
}


@pytest.mark.parametrize("row", [row if row in QUICK else pytest.param(row, marks=pytest.mark.full) for row in ROWS])
def test_same_bits_as_stock(ranks: RankPool, row: str) -> None:
    name, layout, num_microbatches, options = ROWS[row]
    of_v = name == "zb-v"  # its placement is not that of stock, which other tests compare
    runs = [name if of_v else None, f"{name} {ALL}", f"{name} {HALF}"]
    flags = layout.flags(num_microbatches, f"{LARGE} {options} --untie-embeddings-and-output-weights")
    results = ranks.run(layout.num_ranks, train, flags, runs, timeout=120)
    assert_same_bits([[outcome for outcome, _ in of_rank] for of_rank in results], runs)
    assert all(peak for _, peak in results[0][1:])


@pytest.mark.full
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_same_bits_as_without_offload(ranks: RankPool, name: str, option: str) -> None:
    tensor, data = 1 + (option == "tensor and sequence parallel"), 1 + (option == "distributed optimizer")
    num_ranks = 3 if name == "1f1b" else 2  # with 2, each backward follows too closely for anything to move
    layout = Layout(num_ranks, num_layers=2 * num_ranks, tensor=tensor, data=data)
    flags = layout.flags(6, f"{LARGE} {OPTIONS[option]} {chunks_of(name)}")
    runs = [name, f"{name} {ALL}", f"{name} {HALF}"]
    results = ranks.run(layout.num_ranks, train, flags, runs, timeout=120)
    assert_same_bits([[outcome for outcome, _ in of_rank] for of_rank in results], runs)
    assert all(peak for _, peak in results[0][1:])


def chunks_of(name: str) -> str:
    return CHUNKS if name in CHUNKED and name != "zb-v" else ""
