"""Tests of rank groups: equality with megatron-core's groups, and their text."""

from __future__ import annotations

import pytest
from megatron.core.parallel_state import RankGenerator

from megatron.zero_bubble.cli.rank_groups import RankGroups, show
from megatron.zero_bubble.planning.job.arguments.checks import check_layout
from megatron.zero_bubble.planning.job.arguments.parser import parse_megatron
from megatron.zero_bubble.planning.run_options import RunOptions

SHAPES = "--num-layers 24 --hidden-size 96 --num-attention-heads 24 --seq-length 48 --micro-batch-size 1"
TOKENS = {"tensor": "tp", "context": "cp", "data": "dp", "pipeline": "pp"}
EXPERT_TOKENS = {"expert tensor": "tp", "expert": "ep", "expert data": "dp", "pipeline": "pp"}


def groups_of(t: int, c: int, p: int, nodes: int, node_size: int, experts: str = "") -> RankGroups:
    flags = f"--tensor-model-parallel-size {t} --context-parallel-size {c} --pipeline-model-parallel-size {p} {experts}"
    args, unread = parse_megatron(f"{SHAPES} {flags}".split())
    assert not unread
    args.run = RunOptions()
    check_layout(args, nodes * node_size)
    return RankGroups.of(args, nodes, node_size)


@pytest.mark.parametrize(("t", "c", "p", "nodes"), [(2, 2, 3, 3), (1, 1, 4, 2), (4, 1, 2, 4), (2, 4, 1, 2)])
def test_groups_equal_megatrons(t: int, c: int, p: int, nodes: int) -> None:
    groups = groups_of(t, c, p, nodes, 8)
    d = nodes * 8 // (t * c * p)
    generator = RankGenerator(tp=t, ep=1, dp=d, pp=p, cp=c, order="tp-cp-ep-dp-pp")
    for kind, token in TOKENS.items():
        assert sorted(groups.groups(kind)) == sorted(map(tuple, generator.get_ranks(token)))
    assert groups.kinds == tuple(TOKENS)


def test_expert_groups_equal_megatrons() -> None:
    flags = "--num-experts 8 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --sequence-parallel"
    groups = groups_of(2, 1, 2, 2, 8, flags)
    generator = RankGenerator(tp=1, ep=4, dp=2, pp=2, cp=1, order="tp-cp-ep-dp-pp")
    for kind, token in EXPERT_TOKENS.items():
        assert sorted(groups.groups(kind)) == sorted(map(tuple, generator.get_ranks(token)))
    assert "expert           4 groups of 4    each on one node" in groups.text()


@pytest.mark.parametrize("flags", ["", "--use-tp-pp-dp-mapping"])
def test_pipeline_ranks_equal_megatrons(flags: str) -> None:
    """``pipeline_rank`` returns the global ranks with one position in their pipelines."""
    groups = groups_of(2, 2, 3, 3, 8, flags)
    for rank in range(3):
        assert sorted(groups.pipeline_rank(rank)) == sorted(group[rank] for group in groups.groups("pipeline"))
    assert groups.nodes(groups.pipeline_rank(1)) == ((0, 2) if flags else (1,))


def test_groups_with_tp_pp_dp_mapping_equal_megatrons() -> None:
    groups = groups_of(2, 2, 3, 3, 8, "--use-tp-pp-dp-mapping")
    generator = RankGenerator(tp=2, ep=1, dp=2, pp=3, cp=2, order="tp-cp-ep-pp-dp")
    for kind, token in TOKENS.items():
        assert sorted(groups.groups(kind)) == sorted(map(tuple, generator.get_ranks(token)))
    assert "tensor 2 x context 2 x pipeline 3 x data 2" in groups.text()


def test_tensor_group_across_nodes_causes_a_warning() -> None:
    assert groups_of(4, 1, 2, 2, 4).warning() == ""
    warning = groups_of(4, 1, 1, 2, 2).warning()
    assert "got ranks 0-3 on nodes 0-1; make the number of processes per node, 2, a multiple of" in warning
    # With 3 processes per node, only the second group spans two nodes.
    assert "got ranks 2-3 on nodes 0-1" in groups_of(2, 1, 1, 2, 3).warning()


def test_many_groups_are_abbreviated_to_one_line() -> None:
    text = groups_of(8, 1, 4, 128, 8).text()
    assert max(map(len, text.splitlines())) <= 120
    assert text.startswith("128 nodes x 8 processes = 1024 ranks: tensor 8 x data 32 x pipeline 4\n")
    assert "0-7  8-15" in text and "...  1016-1023" in text


def test_ranks_are_abbreviated() -> None:
    assert [show(ranks) for ranks in ((3,), (0, 1), range(8), (0, 8, 16), range(0, 90, 9))] == [
        "3",
        "0-1",
        "0-7",
        "0,8,16",
        "0,9..81",
    ]
