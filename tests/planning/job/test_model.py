"""The layout of a job whose layers do not divide evenly."""

from __future__ import annotations

import argparse

import pytest

from megatron.zero_bubble import Placement
from megatron.zero_bubble.core.costs.model import PARTS
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.layout import stage_layers
from megatron.zero_bubble.planning.job.arguments.parser import parse, parse_megatron
from megatron.zero_bubble.planning.job.model import model_of, stated_vocab_size, uneven_layout, work_of_kinds

SHAPES = "--hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 1 --num-layers 18"
LINEAR = Placement.linear(4)


def job(flags: str = "", **more: object) -> argparse.Namespace:
    args = parse(f"{SHAPES} {flags}".split())
    vars(args).update(more)
    return args


def megatron_job(flags: str) -> argparse.Namespace:
    args, unread = parse_megatron(f"{SHAPES} {flags}".split())
    assert not unread
    return args


def layers(args: argparse.Namespace, vocabulary: int | None, placement: Placement = LINEAR) -> tuple[int, ...]:
    return stage_layers(placement, 18, uneven_layout(args, placement, vocabulary))


def test_a_large_vocabulary_takes_layers_from_the_last_stage() -> None:
    """Its output layer takes as many operations as V / (12 h + 2 s) layers: 2 and 8."""
    assert layers(job(), 1024) == (4, 5, 5, 4)
    assert layers(job(), 32_768) == (5, 5, 5, 3)
    assert layers(job(), 128_000) == (6, 6, 6, 0)


def test_multi_token_prediction_takes_layers_from_the_last_stage() -> None:
    """Each is a layer, a sixth of one for its projection, and an output layer, which is small here."""
    assert layers(job(), 1024)[-1] == 4
    assert layers(job(mtp_num_layers=1), 1024)[-1] == 3
    assert layers(job(mtp_num_layers=1), 32_768)[-1] == 0
    assert uneven_layout(job(mtp_num_layers=2), LINEAR, 1024) == "Et*5|(t*5|)*2t*3mmL"
    experts = job("--num-experts 8 --moe-router-topk 4 --disable-bias-linear", mtp_num_layers=1)
    assert uneven_layout(experts, LINEAR, 1024).endswith("mL")


def test_a_division_knows_no_frozen_layers() -> None:
    """The run that makes it has no such flags."""
    plain, frozen = (megatron_job(f"--swiglu {more}") for more in ("", "--frozen-layers 9 --lora-rank 8"))
    assert uneven_layout(frozen, LINEAR, 32_768) == uneven_layout(plain, LINEAR, 32_768)
    assert work_of_kinds(frozen, 32_768) == work_of_kinds(plain, 32_768)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--lora-rank 0", "must be 1 or more; got 0"),
        ("--lora-rank 8 --target-modules linear_qkv q_proj", "got --target-modules q_proj"),
        ("--frozen-layers 19", "from 0 to the number of layers, 18; got 19"),
        ("--frozen-layers -1", "got -1"),
    ],
)
def test_adapters_and_frozen_layers_that_there_cannot_be(flags: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        model_of(megatron_job(flags), (9, 9))


def test_both_ends_are_on_one_rank_of_a_v() -> None:
    vee = Placement.vee(4)
    assert layers(job(), 32_768, vee) == (3, 3, 2, 3, 2, 3, 2, 0)
    assert layers(job(), 128_000, vee) == (0, 3, 3, 3, 3, 3, 3, 0)


@pytest.mark.parametrize("missing", [{"hidden_size": None}, {"seq_length": None}, {}])
def test_without_shapes_or_vocabulary_each_end_counts_as_a_layer(missing: dict[str, object]) -> None:
    assert layers(job(**missing), 128_000 if missing else None) == (4, 5, 5, 4)


def test_layers_with_experts_take_longer_than_dense_ones() -> None:
    """With eight layers' worth of experts in the last third, the first stages get most layers."""
    experts = job("--num-experts 8 --moe-router-topk 4 --moe-shared-expert-intermediate-size 8192")
    experts.moe_layer_freq = [0] * 12 + [1] * 6
    found = layers(experts, 1024)
    assert found[0] > found[-1] + 3
    experts.moe_layer_freq = 2
    assert max(layers(experts, 1024)) <= 6
    vars(experts).update(num_experts=experts.num_moe_experts, moe_layer_freq=[0] * 12 + [1] * 6)
    del experts.num_moe_experts
    assert layers(experts, 1024) == found, "Megatron-LM's name for the number of experts"


def test_mlps_are_fused_where_the_option_is_on_and_the_operation_has_no_queue() -> None:
    options = {"vocab_size": 1024, "use_transformer_engine_op_fuser": True}
    assert not model_of(job(vocab_size=1024), (18,)).joined
    assert model_of(job(**options), (18,)).joined == ("mlp",)
    assert not model_of(job(**options, use_grouped_gemm_for_dense_mlp=True), (18,)).joined


def test_a_list_of_layers_with_experts_has_one_entry_per_layer() -> None:
    experts = job("--num-experts 8", moe_layer_freq=[1] * 17)
    with pytest.raises(UserError, match="--moe-layer-freq must have one entry per layer, got 17 entries and 18 layers"):
        uneven_layout(experts, LINEAR, 1024)


def test_the_stated_size_of_the_vocabulary_is_padded() -> None:
    tensor = job("--tensor-model-parallel-size 2 --tokenizer-type NullTokenizer --vocab-size 255")
    assert stated_vocab_size(tensor) == 256
    assert stated_vocab_size(job("--vocab-size 257", tokenizer_type="HuggingFaceTokenizer")) == 384
    assert stated_vocab_size(job()) is None


def test_too_few_layers_are_rejected() -> None:
    with pytest.raises(UserError, match="18 layers with .* do not fill 40 pipeline stages; use at least 38 layers"):
        uneven_layout(job(), Placement.vee(20), 1024)


@pytest.mark.parametrize(
    ("flags", "window", "windowed"),
    [
        ("", None, 1.0),
        ("--window-size 127,0", 128, 1.0),
        ("--window-size (127,0) --window-attn-skip-freq 4", 128, 0.75),
        ("--window-size 127,0 --window-attn-skip-freq [1,1,0]*6", 128, 2 / 3),
        ("--window-size=-1,0 --window-attn-skip-freq 2", None, 1.0),
    ],
)
def test_windows_of_attention_are_megatrons(flags: str, window: int | None, windowed: float) -> None:
    found = model_of(megatron_job(flags), (18,))
    assert (found.window, found.windowed) == (window, pytest.approx(windowed))


def test_estimates_know_fused_experts_and_groups_of_them() -> None:
    flags = "--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 2 --use-transformer-engine-op-fuser"
    found = model_of(megatron_job(f"{flags} --disable-bias-linear"), (18,)).experts
    assert found is not None
    assert (found.fused, found.groups, found.group_top_k) == (True, 4, 2)


def test_parts_in_graphs_join_w_to_b_where_w_cannot_be_a_graph() -> None:
    def of(**options: object) -> tuple[tuple[str, ...], tuple[str, ...]]:
        model = model_of(job(vocab_size=1024, **options), (18,))
        return model.captured, model.joined

    engine = {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn"], "add_bias_linear": False}
    assert of() == ((), ())
    assert of(**engine) == (("attention",), ())
    assert of(**engine | {"add_bias_linear": True}) == (("attention",), ("attention",))
    assert of(**engine, use_transformer_engine_op_fuser=True) == (("attention",), ("attention", "mlp"))
    assert of(cuda_graph_impl="local", add_bias_linear=True) == (PARTS, ())
    assert of(cuda_graph_impl="full_iteration") == ((), ())


@pytest.mark.parametrize(
    ("flags", "streams"),
    [
        ("", 1),
        ("--num-residual-streams 3", 1),
        ("--enable-hyper-connections --num-residual-streams 3", 3),
        ("--enable-mhc-connections", 4),
    ],
)
def test_streams_of_hyper_connections_are_megatrons(flags: str, streams: int) -> None:
    assert model_of(megatron_job(flags), (18,)).streams == streams
