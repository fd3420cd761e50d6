"""How the layers of a hybrid model are divided among the stages of a job."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.zero_bubble import Placement
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.plan import PlanFile
from megatron.zero_bubble.core.schedules import build
from megatron.zero_bubble.planning.job.hybrid import (
    check_pattern,
    check_stages_of_pattern,
    chunks_of_pattern,
    divide_pattern,
    is_hybrid,
    take_pattern,
)
from megatron.zero_bubble.planning.job.model import unestimated_kinds, work_of_kinds
from megatron.zero_bubble.planning.job.pattern import pattern_of

LINE, VEE = Placement.linear(2), Placement.vee(2)
ENDS = {"decoder_first_pipeline_num_layers": None, "decoder_last_pipeline_num_layers": None}
SHAPES: dict[str, Any] = {
    "hidden_size": 1024, "num_attention_heads": 8, "seq_length": 1024, "micro_batch_size": 1,
    "ffn_hidden_size": None, "swiglu": False, "group_query_attention": False, "num_query_groups": None,
    "kv_channels": None, "vocab_size": 8000, "attention_backend": "flash", "tensor_model_parallel_size": 1,
    "sequence_parallel": False, "recompute_granularity": None, "num_experts": 8, "moe_router_topk": 2,
    "moe_ffn_hidden_size": 512, "moe_shared_expert_intermediate_size": None,
}  # fmt: skip


def job(pattern: str, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(hybrid_layer_pattern=pattern, **{**ENDS, **more})


def divided(pattern: str, placement: Placement, **more: Any) -> str:
    """The pattern that a job has after its division."""
    args = job(pattern, **more)
    divide_pattern(args, placement, None if "hidden_size" not in more else 8000)
    return str(args.hybrid_layer_pattern)


def test_pattern_sets_the_numbers_of_layers() -> None:
    args = job("M*M-|ME/*-/*-")
    check_pattern(args)
    assert (args.num_layers, args.mtp_num_layers) == (6, 2)
    older = SimpleNamespace(hybrid_override_pattern="M*M-", num_layers=4)
    check_pattern(older)
    assert pattern_of(older) is not None and older.num_layers == 4
    assert pattern_of(SimpleNamespace(num_layers=4)) is None


def test_other_flags_that_divide_the_layers_are_refused() -> None:
    refused = {"num_virtual_stages_per_pipeline_rank": 2, "account_for_loss_in_pipeline_split": True}
    for name, value in refused.items():
        flag = f"--{name.replace('_', '-')}{'' if value is True else ' 2'}"
        with pytest.raises(UserError, match=f"between its .; got {flag} besides 'M-.M.'; drop the flag"):
            check_pattern(job("M-|M*", **{name: value}))


def chunks(text: str) -> int | None:
    args = job(text, pipeline_model_parallel_size=2, vocab_size=None)
    pattern = pattern_of(args)
    assert pattern is not None
    return chunks_of_pattern(args, pattern)


def test_stages_per_rank_of_a_pattern() -> None:
    assert [chunks(text) for text in ("M-M*", "M-|M*", "M|-|M|*", "||M*|")] == [None, 1, 2, 2]
    with pytest.raises(UserError, match=r"every pipeline rank, got 3 stages and 2 ranks in .*; give --h.* 'M-\|M\*'"):
        chunks("M|-|M*")


def test_megatron_divides_where_it_can() -> None:
    for text in ("M-M*", "M-|M*", "M-M*/M-"):
        assert divided(text, LINE) == text
    assert divided("M-M*M", LINE, decoder_first_pipeline_num_layers=2) == "M-M*M"


def test_patterns_are_cut_by_work() -> None:
    """Where the shapes are unknown, all layers, the embedding and the output layer count as one layer each."""
    assert divided("M-M*M", LINE) == "M-M|*M"
    assert divided("M-M*M-M*/M-", VEE) == "M-|M*M|-M*|/M-"  # the prediction and its output layer are on the last stage
    layers = "*" * 9 + "M" * 8
    assert len(divided(layers, LINE, **SHAPES).partition("|")[0]) > 9 == len(divided(layers, LINE).partition("|")[0])


def test_several_stages_need_the_bars_of_the_pattern() -> None:
    message = r"got --decoder-last-pipeline-num-layers 2; drop the flag, and give --hybrid-layer-pattern '\|M\|M\|'"
    with pytest.raises(UserError, match=message):
        divided("MM", VEE, decoder_last_pipeline_num_layers=2)


def test_patterns_with_other_stages_are_refused_with_one_that_fits() -> None:
    looped = Placement.interleaved(2, 2)
    for text, placement in {"M|M": VEE, "M|M|M|M|M|M": VEE, "M|M|M|M": LINE, "MM|": looped}.items():
        message = rf"the schedule has {placement.num_stages} stages, and .*; give --hybrid-layer-pattern '[M|]+'$"
        with pytest.raises(UserError, match=message):
            check_stages_of_pattern(job(text, vocab_size=None), placement, takes_chunks=True)
    for text, placement in {"MM": VEE, "|M|M|": VEE, "M|M": LINE, "M|M|M|M|M|M": looped}.items():
        check_stages_of_pattern(job(text, vocab_size=None), placement, takes_chunks=True)
    with pytest.raises(UserError, match="the schedule has 4 stages, and --hybrid-layer-pattern 6"):
        check_stages_of_pattern(job("M|M|M|M|M|M", vocab_size=None), looped, takes_chunks=False)


def test_older_megatrons_have_one_stage_per_rank() -> None:
    older = SimpleNamespace(hybrid_override_pattern="M*M-M", **ENDS)
    divide_pattern(older, LINE, None)
    assert older.hybrid_override_pattern == "M*M-M"
    with pytest.raises(UserError, match="one stage per rank in this version of Megatron-LM, and the schedule has 2"):
        divide_pattern(older, VEE, None)
    assert is_hybrid(SimpleNamespace(is_hybrid_model=True)) and not is_hybrid(SimpleNamespace(spec=None))
    assert is_hybrid(SimpleNamespace(spec=["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"]))


def plan(layout: str) -> PlanFile:
    schedule = build("zb-v", num_ranks=2, num_microbatches=4)
    return PlanFile(schedule, layout=layout)


def test_stages_get_the_layers_of_a_plan() -> None:
    layers = (1, 2, 1, 0)
    for text, wanted in {"M-M*": "M|-M|*|", "M|-M|*|": "M|-M|*|"}.items():
        args = job(text)
        pattern = pattern_of(args)
        assert pattern is not None
        take_pattern(args, pattern, plan("Et|tt|t|L"), layers, "plan.json")
        assert args.hybrid_layer_pattern == wanted
    other, more = pattern_of(job("M|-|M|*")), pattern_of(job("M-M*M"))
    assert other is not None and more is not None
    with pytest.raises(UserError, match=r"got 1, 1, 1, 1; give --hybrid-layer-pattern 'M\|-M\|\*\|'"):
        take_pattern(job("M|-|M|*"), other, plan("Et|tt|t|L"), layers, "plan.json")
    with pytest.raises(UserError, match="is for 4 layers, but --hybrid-layer-pattern has 5; plan the schedule"):
        take_pattern(job("M-M*M"), more, plan("Et|tt|t|L"), layers, "plan.json")


def test_work_of_each_kind() -> None:
    work, embedding, loss = work_of_kinds(SimpleNamespace(**SHAPES), 8000)
    assert work["-"] > work["*"] > 0 and work["D"] == work["+"] == work["*"] and work["G"] != work["M"] > 0
    assert work["E"] == pytest.approx(work["-"] / 4, rel=0.3)  # two of the experts, each an eighth as wide as the MLP
    assert 0 < embedding < min(work.values()) and loss > 0
    assert set(work_of_kinds(SimpleNamespace(**SHAPES), None)[0].values()) == {1.0}
    assert unestimated_kinds(job("M-GE*+D")) == ("experts", "latent attention", "sparse attention")
    sizes = {"dsa_indexer_n_heads": 4, "dsa_indexer_head_dim": 8, "dsa_indexer_topk": 16}
    sparse = SimpleNamespace(**SHAPES, **sizes, multi_latent_attention=True)
    assert work_of_kinds(sparse, 8000)[0]["D"] != work_of_kinds(sparse, 8000)[0]["+"]
    sparse.hybrid_layer_pattern = "D-"
    assert unestimated_kinds(sparse) == ()
