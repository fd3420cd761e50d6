"""A training loop of one's own, ``examples/own_loop.py``, on CPU ranks; and what it gets from this package."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

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
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(EXAMPLE), "zb-v", "--cpu"]
    ended = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200, check=True
    )
    assert [line.split(": ")[0] for line in ended.stdout.splitlines()] == [f"step {step}" for step in range(5)]


def tied(rank: int) -> tuple[Any, ...]:
    """Build the chunks of a V with a tied embedding on both ends; return what each chunk is."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    parallel_state.destroy_model_parallel()
    stages = megatron.zero_bubble.ModelStages("zb-v", 2)
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=stages.virtual_size,
        get_embedding_ranks=stages.embedding_ranks,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    shape = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 4}
    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": stages.virtual_size}
    config = TransformerConfig(**shape, **sizes, pipeline_dtype=torch.float32)
    megatron.zero_bubble.apply("zb-v")
    try:
        chunks: list[Any] = stages.build(
            lambda **stage: GPTModel(
                config, get_gpt_layer_local_spec(), 32, 8, share_embeddings_and_output_weights=True, **stage
            )
        )
        with pytest.raises(UserError, match="the stages are for 4 pipeline ranks; got 2; give ModelStages"):
            megatron.zero_bubble.ModelStages("zb-v", 4).build(lambda **_: chunks[0])
    finally:
        megatron.zero_bubble.revert()
        parallel_state.destroy_model_parallel()
    if rank == 0:
        first, last = chunks
        assert first.embedding.word_embeddings.weight.equal(last.output_layer.weight)
    return tuple(
        (chunk.vp_stage, chunk.pre_process, chunk.post_process, chunk.decoder.layers[0].layer_number)
        for chunk in chunks
    )


def test_the_chunks_of_a_v_are_where_its_stages_are(ranks: RankPool) -> None:
    assert ranks.run(2, tied) == [
        ((0, True, False, 1), (1, False, True, 4)),
        ((0, False, False, 2), (1, False, False, 3)),
    ]


def test_cpu_ranks_are_chosen_before_megatron_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", sys)
    monkeypatch.setattr("megatron.zero_bubble.platforms.cpu.installed", lambda: False)
    with pytest.raises(UserError, match=r"CPU ranks must be chosen before megatron\.core is imported; .* call"):
        megatron.zero_bubble.use_cpu_ranks()
