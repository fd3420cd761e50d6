"""Tests of the number of layers per stage, even and uneven."""

from __future__ import annotations

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble import Placement
from megatron.zero_bubble.cli.job_figures import job_layers
from megatron.zero_bubble.job.layers import balanced_layout
from megatron.zero_bubble.training.arguments import parse
from megatron.zero_bubble.training.checks import check_layout

SHAPES = "--hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --pipeline-model-parallel-size"
ENDS = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"


def by_rank(layout: str, placement: Placement) -> list[int]:
    """Return the number of layers, embedding and loss included, per rank."""
    stages = layout.split("|")
    return [sum(len(stages[s]) for s in placement.stages_of(rank)) for rank in range(placement.num_ranks)]


def test_balanced_layout_of_46_layers_on_16_ranks() -> None:
    linear, vee = Placement.linear(16), Placement.vee(16)
    assert balanced_layout(linear, 46) == "|".join(["Ett", *["ttt"] * 14, "ttL"])
    layout = balanced_layout(vee, 46)
    assert by_rank(layout, vee) == [3] * 16
    assert layout.count("t") == 46 and len(layout.split("|")) == 32


@given(st.integers(1, 8), st.sampled_from([Placement.linear, Placement.vee]), st.integers(0, 40))
def test_balanced_layout_differs_by_at_most_one_layer_per_rank(p: int, make, layers: int) -> None:
    placement = make(p)
    try:
        layout = balanced_layout(placement, layers)
    except ValueError as error:
        least = int(str(error).split("at least ")[1].split()[0])
        assert layers < least
        assert balanced_layout(placement, least).count("t") == least
        return
    stages = layout.split("|")
    assert layout.count("t") == layers and len(stages) == placement.num_stages and all(stages)
    assert stages[0].startswith("E") and stages[-1].endswith("L")
    assert max(by_rank(layout, placement)) - min(by_rank(layout, placement)) <= 1


def test_too_few_layers_are_rejected() -> None:
    with pytest.raises(ValueError, match="5 layers with .* do not fill 8 pipeline stages; use at least 6 layers"):
        balanced_layout(Placement.vee(4), 5)


def job(flags: str) -> argparse.Namespace:
    args = parse(f"{SHAPES} {flags}".split())
    check_layout(args, args.pipeline_model_parallel_size)
    return args


def megatrons(args: argparse.Namespace) -> list[int]:
    """Return the number of layers that megatron-core builds per stage."""
    import torch
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    names = (
        "num_layers hidden_size num_attention_heads num_layers_in_first_pipeline_stage pipeline_model_parallel_size "
    )
    names += "num_layers_in_last_pipeline_stage virtual_pipeline_model_parallel_size "
    names += "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split"
    given = {name: getattr(args, name) for name in names.split()}
    config = TransformerConfig(**given, pipeline_dtype=torch.float32)
    p, chunks = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    stages = ((rank, chunk if chunks else None) for chunk in range(chunks or 1) for rank in range(p))
    return [get_num_layers_to_build(config, chunk, rank) for rank, chunk in stages]


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        ("1 --num-layers 5", [5]),
        ("4 --num-layers 8", [2, 2, 2, 2]),
        ("4 --num-layers 11 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 4", [1, 3, 3, 4]),
        ("2 --num-layers 5 --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 3", [2, 3]),
        (
            f"2 --num-layers 6 {ENDS} --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 4",
            [1, 2, 2, 1],
        ),
        ("3 --num-layers 10 --decoder-last-pipeline-num-layers 2 --zero-bubble-schedule zb-v", [2, 2, 1, 2, 2, 1]),
    ],
)
def test_layers_per_stage_equal_megatrons(flags: str, layers: list[int]) -> None:
    args = job(flags)
    assert list(job_layers(args)) == layers == megatrons(args)


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        ("4 --num-layers 10 --zero-bubble-schedule zb-h1", [2, 3, 3, 2]),  # the balanced layout
        ("4 --num-layers 7 --pipeline-model-parallel-layout Et*2|(tt|)*2,tL", [2, 2, 2, 1]),
        ("2 --num-layers 3 --pipeline-model-parallel-layout E(t|t)*1tL", [1, 2]),
    ],
)
def test_layout_is_parsed_as_in_megatron(flags: str, layers: list[int]) -> None:
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    args = job(flags)
    stages = PipelineParallelLayerLayout.parse_str_to_list(args.pipeline_model_parallel_layout)
    assert list(job_layers(args)) == layers == [stage.count(LayerType.decoder) for stage in stages]


def test_layout_with_other_numbers_of_stages_or_layers_is_rejected() -> None:
    with pytest.raises(ValueError, match="has 2 stages and 3 layers, but the job has 2 stages and 4 layers"):
        job_layers(job("2 --num-layers 4 --pipeline-model-parallel-layout Et|ttL"))
