"""Pairs of a forward and a backward, whose layers run in turn, give the bits of stock Megatron, with its own overlap of
experts and without.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.zero_bubble import PassCosts, build, simulate
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.formats.plan import plan_to_json
from megatron.zero_bubble.planning.exclusions import refuse_excluded
from tests.helpers.expert_models import COMBINED, PLAIN, train_with_experts
from tests.helpers.ranks import RankPool

ROWS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "m=4": (2, 4, {}),
    "m=6, shared experts, dense first layer, expert bias": (
        2,
        6,
        {
            "moe_shared_expert_intermediate_size": 16,
            "moe_layer_freq": [0, 1, 1, 1],
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
        },
    ),
    "fp16, two layers per stage": (2, 4, {"dtype": torch.float16, "num_layers": 8}),
    "four ranks": (4, 8, {"num_layers": 8}),
}


def plan_files(folder: Path, pipeline: int, num_microbatches: int) -> list[str]:
    """Files of all schedules with pairs."""
    files = []
    for name, num_chunks in (("interleaved-1f1b", 2), ("dualpipe-v", None)):
        sizes = {"num_ranks": pipeline, "num_microbatches": num_microbatches}
        schedule = build(name, **sizes, num_chunks=num_chunks, pairs=True)
        assert schedule.pairs, "a schedule with pairs"
        file = folder / f"{name}.json"
        file.write_text(plan_to_json(simulate(schedule, PassCosts.uniform(schedule.placement, 1, 1, 1))))
        files.append(str(file))
    return files


@pytest.mark.parametrize(
    "row", [name if name == "m=4" else pytest.param(name, marks=pytest.mark.full) for name in ROWS]
)
def test_same_bits_as_stock(ranks: RankPool, tmp_path: Path, row: str) -> None:
    pipeline, num_microbatches, options = ROWS[row]
    names = [PLAIN, COMBINED, *plan_files(tmp_path, pipeline, num_microbatches)]
    results = ranks.run(2 * pipeline, train_with_experts, names, num_microbatches, pipeline, options, timeout=300)
    stock: dict[str, str] = {}
    for run, name in enumerate(names):
        losses = [of_rank[run][0] for of_rank in results if of_rank[run][0]]
        weights = {key: digest for of_rank in results for key, digest in of_rank[run][1].items()}
        if name == PLAIN:
            stock, of_stock = weights, losses
        assert losses == of_stock, name
        assert [key for key in stock if weights[key] != stock[key]] == [], name


@pytest.mark.parametrize("other", ["num_slices=2", "vocabulary=1", "offload=all", "post_validation", "shard_weights"])
def test_what_pairs_exclude_is_refused(other: str) -> None:
    name, _, value = other.partition("=")
    with pytest.raises(UserError, match="pairs and .* exclude each other"):
        refuse_excluded({"pairs": True, name: int(value) if value.isdecimal() else value or True})
