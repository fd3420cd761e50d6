"""A training loop of one's own, ``examples/own_loop.py``, on CPU ranks; and what it gets from this package."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import megatron.zero_bubble
from megatron.zero_bubble.errors import UserError
from tests.helpers.ranks import RankPool

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_loop.py"


def losses(rank: int, schedules: tuple[str, ...]) -> dict[str, list[float]]:
    from megatron.core import parallel_state

    example = runpy.run_path(str(EXAMPLE))
    found = {}
    for schedule in schedules:
        parallel_state.destroy_model_parallel()
        try:
            found[schedule] = example["train"](schedule, "cpu")
        finally:
            megatron.zero_bubble.revert()
            parallel_state.destroy_model_parallel()
    return found


def test_the_example_has_the_losses_of_stock_under_every_schedule(ranks: RankPool) -> None:
    first, last = ranks.run(2, losses, ("stock", "zb-h1", "zb-v"))
    assert first == {"stock": [], "zb-h1": [], "zb-v": []}  # as Megatron, losses are returned on the last rank
    assert len(last["stock"]) == 5
    assert last["stock"][-1] < last["stock"][0] - 0.01
    assert last["zb-h1"] == pytest.approx(last["stock"], rel=1e-6)
    assert last["zb-v"] == pytest.approx(last["stock"], rel=1e-6)


def test_the_example_runs_as_a_script_on_cpu_ranks() -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(EXAMPLE),
        "zb-v",
        "--cpu",
    ]
    ended = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200, check=True
    )
    assert [line.split(": ")[0] for line in ended.stdout.splitlines()] == [f"step {step}" for step in range(5)]


def test_ranks_with_the_embedding() -> None:
    """The last but one stage of a V is on its second rank."""

    def ranks(schedule: str, **more: Any) -> list[int]:
        return megatron.zero_bubble.ModelStages(schedule, 4, **more).embedding_ranks([4, 5, 6, 7])

    assert ranks("zb-h1") == [4, 7] and ranks("zb-v") == [4]
    assert ranks("zb-h1", layout="Ett|tt|tm|L") == [4, 6, 7]
    assert ranks("zb-h1", layout="Ett|tt|tm|L", tied=False) == [4, 6]
    for tied in (False, True):
        assert ranks("zb-v", layout="Et|t|t|t|t|t|m|L", tied=tied) == [4, 5]


def test_cpu_ranks_are_chosen_before_megatron_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", sys)
    monkeypatch.setattr("megatron.zero_bubble.platforms.cpu.installed", lambda: False)
    with pytest.raises(UserError, match=r"CPU ranks must be chosen before megatron\.core is imported; .* call"):
        megatron.zero_bubble.use_cpu_ranks()


def test_embedding_group_is_that_of_the_placement_whatever_a_script_gives() -> None:
    """Megatron-LM's scripts give Megatron's own ranks, with which the ranks of a V would wait for each other."""
    from megatron.zero_bubble.adapter.placement import embedding_ranks, grouping_ends
    from megatron.zero_bubble.ir import Placement

    given: list[Any] = []

    def initialize(get_embedding_ranks: Any = None) -> None:
        given.append(get_embedding_ranks)

    vee = Placement.vee(2)
    grouped = grouping_ends(initialize, lambda _: vee)
    grouped()
    grouped(get_embedding_ranks=lambda ranks, *_: ranks)
    grouped(get_embedding_ranks=embedding_ranks(vee, (0, 2)))
    assert [ranks([4, 5], None) for ranks in given] == [[4], [4], [4, 5]]


def test_one_chunk_of_a_rank_may_be_any_model() -> None:
    """There is no second copy of an embedding, so a model need not say where its embedding is, as GPTModel does."""
    from torch import nn

    from megatron.zero_bubble.adapter.placement import copy_embedding

    chunk = nn.Linear(1, 1)
    chunk.pre_process, chunk.post_process = True, False  # type: ignore[assignment]
    copy_embedding([chunk])
