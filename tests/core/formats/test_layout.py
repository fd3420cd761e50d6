"""Tests of the number of layers per stage, even and uneven."""

from __future__ import annotations

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble import Placement
from megatron.zero_bubble.core.formats.layout import job_layers, layout_text, stage_layers, stages_text
from megatron.zero_bubble.planning.job.arguments.checks import check_layout
from megatron.zero_bubble.planning.job.arguments.parser import parse

SHAPES = "--hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --pipeline-model-parallel-size"
ENDS = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"


@given(st.lists(st.integers(1, 12), min_size=1, max_size=9), st.booleans(), st.booleans())
def test_layouts_are_written_as_they_are_read(counts: list[int], alone: bool, same: bool) -> None:
    """Also by megatron-core, with repeated stages and stages without layers."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    layout = [*([0] if alone else []), *(counts[:1] * len(counts) if same else counts), *([0] if alone else [])]
    text = layout_text(layout)
    assert stage_layers(Placement.linear(len(layout)), sum(layout), text) == tuple(layout)
    stages = PipelineParallelLayerLayout.parse_str_to_list(text)
    assert ["".join(layer.name[0] for layer in stage) for stage in stages] == [
        f"{'e' if s == 0 else ''}{'d' * count}{'l' if s == len(layout) - 1 else ''}" for s, count in enumerate(layout)
    ]


def test_layouts_are_short() -> None:
    assert layout_text((1, 3, 3, 0)) == "Et|(t*3|)*2L"
    assert layout_text((0, 2, 2, 2)) == "E|(tt|)*2ttL"
    assert layout_text((3,)) == "Et*3L"
    assert stages_text((1, 3, 3, 0)) == "1, 3 x2, 0"


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
        ("4 --num-layers 10 --zero-bubble-schedule zb-h1", [2, 3, 3, 2]),  # by the least work of the busiest rank
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
