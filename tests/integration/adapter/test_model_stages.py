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
from megatron.zero_bubble.core.errors import UserError
from tests.helpers.ranks import RankPool

ROOT = Path(__file__).parents[3]
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


@pytest.mark.full
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
    monkeypatch.setattr("megatron.zero_bubble.engine.platforms.cpu.installed", lambda: False)
    with pytest.raises(UserError, match=r"CPU ranks must be chosen before megatron\.core is imported; .* call"):
        megatron.zero_bubble.use_cpu_ranks()


def test_embedding_group_is_that_of_the_placement_whatever_a_script_gives() -> None:
    """Megatron-LM's scripts give Megatron's own ranks, with which the ranks of a V would wait for each other."""
    from megatron.zero_bubble.core.ir import Placement
    from megatron.zero_bubble.integration.adapter.placement import embedding_ranks, grouping_ends

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

    from megatron.zero_bubble.integration.adapter.placement import copy_embedding

    chunk = nn.Linear(1, 1)
    chunk.pre_process, chunk.post_process = True, False  # type: ignore[assignment]
    copy_embedding([chunk])


def build_predicting(layout: str, build: Any) -> list[float]:
    """The sums of the weights of the embedding in the chunks that ``build`` makes of a model on a V of 2 ranks."""
    import torch
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer import TransformerConfig

    tensor_parallel.model_parallel_cuda_manual_seed(7)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        pipeline_model_parallel_layout=layout,
        mtp_num_layers=1,
        pipeline_dtype=torch.float32,
    )
    layers = gpt_layer_specs.get_gpt_layer_local_spec()

    def make(**stage: Any) -> Any:
        mtp = gpt_layer_specs.get_gpt_mtp_block_spec(config, layers, False, stage["vp_stage"])
        return GPTModel(config, layers, 32, 8, position_embedding_type="rope", mtp_block_spec=mtp, **stage)

    chunks = build(make)
    return [chunk.embedding.word_embeddings.weight.sum().item() for chunk in chunks if hasattr(chunk, "embedding")]


def predictions_on_a_v(rank: int) -> tuple[str, list[float]]:
    """The refusal of ``build_stages``, and the sums of the weights that ``ModelStages`` with the layout builds."""
    from megatron.core import parallel_state

    layout = "Et|t|m|L"
    of_groups: dict[str, Any] = {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "create_gloo_process_groups": False,
    }
    megatron.zero_bubble.apply("zb-v")
    try:
        parallel_state.initialize_model_parallel(**of_groups)
        with pytest.raises(UserError) as caught:
            build_predicting(layout, megatron.zero_bubble.build_stages)
        parallel_state.destroy_model_parallel()
        stages = megatron.zero_bubble.ModelStages("zb-v", 2, layout=layout, tied=False)
        parallel_state.initialize_model_parallel(**of_groups, get_embedding_ranks=stages.embedding_ranks)
        return str(caught.value), build_predicting(layout, stages.build)
    finally:
        megatron.zero_bubble.revert()


def test_predictions_on_another_stage_share_the_embedding_or_are_refused(ranks: RankPool) -> None:
    """In a group without them, Megatron would leave their copy of the embedding at zero."""
    (refusal, [first]), (other_refusal, [of_prediction]) = ranks.run(2, predictions_on_a_v)
    start = "the embedding group must have every rank with multi-token prediction; got it in stage 2, on rank 1, which"
    assert refusal == other_refusal
    assert refusal.startswith(start)
    assert first == of_prediction != 0


def groups_of_a_line(rank: int) -> str:
    """The refusal of a V in groups that were made for a line."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2, create_gloo_process_groups=False
    )
    megatron.zero_bubble.apply("zb-v")
    try:
        with pytest.raises(UserError) as caught:
            megatron.zero_bubble.build_stages(lambda **_: pytest.fail("no rank may begin to build"))
        return str(caught.value)
    finally:
        megatron.zero_bubble.revert()


def test_a_wrong_embedding_group_is_refused_on_every_rank(ranks: RankPool) -> None:
    """The ranks between the ends are in neither group, and would find nothing wrong."""
    (refusal,) = set(ranks.run(4, groups_of_a_line))
    assert refusal.startswith("the stages with the embedding are on ranks [0], which must form the embedding group; ")
    assert "; got [0, 3]; " in refusal
