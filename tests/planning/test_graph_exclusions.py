"""With which choices CUDA graphs work; a row refuses its choice alone, however the job asks for graphs."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.planning.job.arguments.parser import parse_megatron
from megatron.zero_bubble.planning.job.options import check_options
from megatron.zero_bubble.planning.run_options import RunOptions
from megatron.zero_bubble.planning.setup import Cuts, Named, Offload, Searched, Setup, Shards, Validated

H1 = Setup(Named("zb-h1"))
ASKED = ({"cuda_graph_impl": "transformer_engine"}, {"external_cuda_graph": True})
EXCLUDED = {
    "sequence slices": RunOptions(Setup(Named("zb-h1"), cuts=Cuts(2, "even"))),
    "sharded units": RunOptions(Setup(Named("zero-pp"), shards=Shards())),
    "hide the all-to-all": RunOptions(Setup(Named("interleaved-1f1b"), pairs=True)),
    "offloading": RunOptions(Setup(Named("zb-h1"), offload=Offload("all"))),
    "different lengths": RunOptions(H1, lengths=("shapes", True)),
}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-h2", "zb-interleaved", "zb-v", "v-half", "dualpipe-v"])
@pytest.mark.parametrize("asked", ASKED, ids=["0.15", "0.14"])
def test_layers_are_captured_under_any_schedule(schedule: str, asked: dict[str, object]) -> None:
    check_options(SimpleNamespace(**asked), RunOptions(Setup(Named(schedule))))


@pytest.mark.parametrize("words", EXCLUDED)
@pytest.mark.parametrize("asked", ASKED, ids=["0.15", "0.14"])
def test_choices_that_exclude_graphs(words: str, asked: dict[str, object]) -> None:
    options = {"bf16": True, "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"}
    check_options(SimpleNamespace(**options), EXCLUDED[words])
    with pytest.raises(UserError, match=f"{words}.* need .*cuda_graph.*; set --cuda-graph-impl none"):
        check_options(SimpleNamespace(**options, **asked), EXCLUDED[words])


@pytest.mark.parametrize("asked", ASKED, ids=["0.15", "0.14"])
def test_steps_are_validated_and_batches_grow(asked: dict[str, object]) -> None:
    given = asked | {"rampup_batch_size": ["8", "8", "64"], "step_batch_size_schedule": "1:4"}
    check_options(SimpleNamespace(**given), RunOptions(Setup(Named("zb-h1"), step=Validated())))


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--cuda-graph-impl transformer_engine", ""),
        ("--cuda-graph-impl transformer_engine --cuda-graph-warmup-steps 1", ""),
        ("--cuda-graph-impl local --cuda-graph-warmup-steps 0", ""),
        ("--cuda-graph-impl transformer_engine --cuda-graph-warmup-steps 0", "set --cuda-graph-warmup-steps 1"),
        ("--external-cuda-graph", "captured before the first iteration"),
    ],
)
def test_plans_need_an_iteration_without_graphs(flags: str, why: str) -> None:
    """Its memory is what the plan is searched with."""
    args, unread = parse_megatron(flags.split())
    assert not unread
    with pytest.raises(UserError, match=f"zb-auto.*{why}") if why else nullcontext():
        check_options(args, RunOptions(Setup(Searched())))


@pytest.mark.parametrize(
    "refused",
    [
        {"enable_cuda_graph": True, "num_experts": 8},
        {"cuda_graph_impl": "local", "num_experts": 8},
        {"cuda_graph_impl": "full_iteration"},
        {"cuda_graph_impl": "transformer_engine", "fine_grained_activation_offloading": True},
        {"cuda_graph_impl": "transformer_engine", "variable_seq_lengths": True},
        {"cuda_graph_impl": "transformer_engine", "overlap_moe_expert_parallel_comm": True},
    ],
    ids=str,
)
def test_other_graphs_and_options_are_refused(refused: dict[str, object]) -> None:
    with pytest.raises(UserError):
        check_options(SimpleNamespace(**refused), RunOptions(H1))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"recompute_granularity": "selective", "attention_dropout": 0.1}, "would draw another mask"),
        ({"qk_clip": True}, "Python keeps the maximum"),
    ],
)
def test_what_a_replay_cannot_repeat_is_refused_with_graphs_of_stages(options: dict[str, object], why: str) -> None:
    given = {"cuda_graph_impl": "local"} | options
    with pytest.raises(UserError, match=why):
        check_options(SimpleNamespace(**given), RunOptions(H1))


@pytest.mark.parametrize(
    ("implementation", "flags"),
    [
        ("transformer_engine", "--fine-grained-activation-offloading"),
        ("local", "--qk-clip"),
        ("local", "--log-max-attention-logit"),
        ("local", "--num-experts 8"),
        ("local", "--fp8-format hybrid"),
        ("local", "--fp4-format e2m1"),
        ("local", "--enable-hyper-connections"),
        ("transformer_engine", "--enable-mhc-connections"),
        ("local", "--hybrid-layer-pattern M*"),
        ("local", "--recompute-activations --attention-dropout 0.1"),
        ("local", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
        ("transformer_engine", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    ],
)
def test_a_dry_run_reads_what_excludes_graphs(implementation: str, flags: str) -> None:
    args, unread = parse_megatron(["--cuda-graph-impl", implementation, *flags.split()])
    assert not unread
    with pytest.raises(UserError, match="cuda.graph"):
        check_options(args, RunOptions(H1))


def test_graphs_of_inference_are_not_those_of_iterations() -> None:
    given = SimpleNamespace(cuda_graph_impl="local", cuda_graph_scope="full_iteration_inference")
    check_options(given, RunOptions(H1))
