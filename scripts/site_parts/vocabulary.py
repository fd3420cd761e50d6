"""The table and the picture of vocabulary parallelism, computed by the planning library."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.costs.vocabulary import VocabularyCosts
from megatron.zero_bubble.core.formats.costs import CostsFile, read_costs_file
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.core.render.svg import render_svg
from megatron.zero_bubble.core.schedules import build
from megatron.zero_bubble.core.search.vocabulary import best_with_vocabulary, with_vocabulary
from site_parts.markdown import table

_PUBLISHED = Path(__file__).parent.parent.parent / "configs/published"
_RANKS = 8
_METHODS = ("stock", "moved_layers", "vocabulary_1", "vocabulary_2")


def by_vocabulary() -> str:
    """Measured and predicted iterations, by the size of the vocabulary."""
    lines = (_PUBLISHED / "vocabulary_a100.csv").read_text(encoding="utf-8").splitlines()
    published = {row["name"]: row for row in csv.DictReader(line for line in lines if not line.startswith("#"))}
    rows = []
    for size in ("32k", "64k", "128k", "256k"):
        cells = [size]
        for method in _METHODS:
            row = published[f"{method}_{size}"]
            measured, microbatches = float(row["measured_ms"]), int(row["microbatches"])
            cells.append(f"{measured:.0f} / {_predicted_ms(method, size, microbatches):.0f}")
        stock = published[f"stock_{size}"]
        ours = _split_ms(size, int(stock["microbatches"]))
        rows.append((*cells, f"{ours:.0f}", f"{float(stock['measured_ms']) / ours:.2f}"))
    words = (
        "Iterations in ms on 8 A100s with 128 microbatches of one sequence of 2048 tokens and a model of 4 billion "
        "parameters: *measured* by the authors of [Vocabulary Parallelism](https://arxiv.org/abs/2411.05288) / "
        "*predicted* by this package from their times of the passes. *ZB-V* is predicted only: the same passes as in "
        "the column before it, with the backward split into halves; *gain* is stock, measured, over ZB-V."
    )
    head = (
        "vocabulary",
        "stock",
        "whole layers moved",
        "1F1B, algorithm 1",
        "1F1B, algorithm 2",
        "ZB-V, algorithm 2",
        "gain",
    )
    return f"{words}\n\n{table(head, rows)}"


def picture() -> str:
    """ZB-H1 with the output layer on the last rank, and with its shards on all ranks, as SVG."""
    placement = Placement.linear(4)
    shard, m = 8.0, 8  # the time of F, B and W of the output layer, divided by the ranks
    alone = (10.0, 10.0, 10.0, 10.0 + 4 * shard / 3)
    stock, even = PassCosts(alone, alone, alone), PassCosts.uniform(placement, 10.0, 10.0, 10.0)
    divided = replace(even, vocabulary=VocabularyCosts.uniform(4, shard * 2 / 3, shard / 3))
    schedule, memory = build("zb-h1", num_ranks=4, num_microbatches=m), PassMemory.uniform(placement)
    made = best_with_vocabulary(schedule, divided, memory, 2)
    return render_svg(simulate(schedule, stock, memory), simulate(made, divided, memory))


def _file(name: str) -> CostsFile:
    return read_costs_file(_PUBLISHED / "vocabulary_a100" / f"{name}.json")


def _predicted_ms(method: str, size: str, num_microbatches: int) -> float:
    schedule = build("1f1b", num_ranks=_RANKS, num_microbatches=num_microbatches)
    costs, _ = _file(f"{method}_{size}").on(schedule.placement)
    if costs.vocabulary is not None:
        even = PassCosts.uniform(schedule.placement, 1.0, 1.0, 1.0)
        schedule = with_vocabulary(schedule, even, 1 if method == "vocabulary_1" else 2, lag=0.5)
    return simulate(schedule, costs).makespan_ms


def _split_ms(size: str, num_microbatches: int) -> float:
    schedule = build("zb-v", num_ranks=_RANKS, num_microbatches=num_microbatches)
    costs, _ = _file(f"vocabulary_2_{size}").on(schedule.placement)
    made = best_with_vocabulary(schedule, costs, PassMemory.uniform(schedule.placement), 2)
    return simulate(made, costs).makespan_ms


PICTURES = {"vocabulary.svg": picture}
PARTS = {"vocabulary": by_vocabulary}
