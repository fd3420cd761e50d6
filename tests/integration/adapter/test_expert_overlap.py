"""Pairs of a forward and a backward, whose layers run in turn, give the bits of stock Megatron, with its own overlap of
experts and without.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.core
import pytest
import torch

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir.vocabulary import Divided
from megatron.zero_bubble.planning.exclusions import refuse_excluded
from megatron.zero_bubble.planning.job.flags import parse_ours
from megatron.zero_bubble.planning.job.options import check_options
from megatron.zero_bubble.planning.job.stages import place_stages
from megatron.zero_bubble.planning.run_options import RunOptions
from megatron.zero_bubble.planning.setup import Cuts, Setup, Shards
from tests.helpers.expert_models import (
    PLAIN_V,
    differences,
    plan_files,
    references,
    searched_plan_file,
    train_with_experts,
)
from tests.helpers.expert_probes import (
    deferred,
    nodes_of_fused_backwards,
    peaks,
    refusal_of_a_loop,
    refusal_of_one_expert,
    sends,
)
from tests.helpers.ranks import RankPool
from tests.helpers.rows import some

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
    "multi-token prediction": (2, 4, {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1}),
    "fp16, two layers per stage": (2, 4, {"dtype": torch.float16, "num_layers": 8}),
    "four ranks": (4, 8, {"num_layers": 8}),
}


@pytest.mark.parametrize(
    "row", [name if name == "m=4" else pytest.param(name, marks=pytest.mark.full) for name in ROWS]
)
def test_same_bits_as_stock(ranks: RankPool, tmp_path: Path, row: str) -> None:
    pipeline, num_microbatches, options = ROWS[row]
    names = [*references(options), *plan_files(tmp_path, pipeline, num_microbatches), PLAIN_V]
    job = names, num_microbatches, pipeline, options, 3 if row == "m=4" else 5
    assert differences(names, ranks.run(2 * pipeline, train_with_experts, *job, timeout=300)) == []


@pytest.mark.parametrize(
    ("row", "num_microbatches"), some([("m=4", 6), ("multi-token prediction", 5), ("four ranks", 12)], ("m=4", 6))
)
def test_a_searched_order_has_the_bits_of_stock(
    ranks: RankPool, tmp_path: Path, row: str, num_microbatches: int
) -> None:
    pipeline, _, options = ROWS[row]
    names = [*references(options), searched_plan_file(tmp_path, pipeline, num_microbatches)]
    job = names, num_microbatches, pipeline, options, 3
    assert differences(names, ranks.run(2 * pipeline, train_with_experts, *job, timeout=300)) == []


def test_weight_gradients_wait_for_their_w_in_pairs_too(ranks: RankPool, tmp_path: Path) -> None:
    """Those of a microbatch that is split, also if its forward runs together with a fused backward."""
    _, dualpipe = plan_files(tmp_path, 2, 4)
    for waiting in ranks.run(4, deferred, dualpipe, 4, timeout=120):
        assert waiting and all(waiting)


def test_a_pair_sends_what_one_pass_gives_while_the_other_still_runs(ranks: RankPool, tmp_path: Path) -> None:
    interleaved, _ = plan_files(tmp_path, 2, 4)
    results = ranks.run(4, sends, interleaved, 4, timeout=120)
    assert all(result and all(is_early for _, is_early in result) for result in results)
    assert {value.lstrip("0123456789")[0] for result in results for value, _ in result} == {"F", "B"}


def test_w_of_experts_runs_beside_the_dispatch_of_its_own_backward(ranks: RankPool) -> None:
    """A node that has issued the dispatch does not wait for W; nor does the message, for that of the last node."""
    layer = ["moe_combine", "mlp", "W of experts", "moe_dispatch", "attn"]
    for result in ranks.run(4, nodes_of_fused_backwards, PLAIN_V, 4, timeout=120):
        assert result
        for work, ran in result:
            # The gradient of stage 2 is for the other stage of the rank.
            loss, sent = ["post_process"] * (work[0] == "3"), ["send"] * (work[0] in "13")
            assert ran == [*loss, *layer, "W", *layer, *sent, "W", "pre_process", "end"], work


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.full)], ids=["interleaved-1f1b", "dualpipe-v"])
def test_the_peak_of_pairs_is_within_the_plan(ranks: RankPool, tmp_path: Path, number: int) -> None:
    """What forwards save and what waits for W is at most 5 % more than planned from the memory of a microbatch, also
    within a pair; the plan has all of its forward before it frees any of its backward.
    """
    name = plan_files(tmp_path, 2, 8)[number]
    for measured, planned in ranks.run(4, peaks, name, 8, timeout=120):
        assert 0.75 * planned < measured < 1.05 * planned


def test_a_loop_that_returns_no_plans_is_refused_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    for said in ranks.run(4, refusal_of_a_loop, plan_files(tmp_path, 2, 4)[0], timeout=120):
        assert "need a forward step that takes return_schedule_plan" in said


def test_one_expert_per_rank_is_refused_where_its_input_is_freed(ranks: RankPool) -> None:
    (said,) = ranks.run(1, refusal_of_one_expert)
    minor = int(megatron.core.__version__.split(".")[1])
    assert (said == "") == (minor >= 17)
    assert not said or said.startswith(
        "2: pairs of a forward and a backward need two experts or more per rank with megatron-core"
    )


@pytest.mark.parametrize(
    "other", [{"cuts": Cuts(2, "even")}, {"vocabulary": Divided(1)}, {"shards": Shards()}], ids=str
)
def test_what_pairs_exclude_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="pairs and .* exclude each other"):
        refuse_excluded(RunOptions(Setup(pairs=True, **other)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"expert_model_parallel_size": 1}, "expert_model_parallel_size to be 2 or more"),
        ({"moe_token_dispatcher_type": "allgather"}, "moe_token_dispatcher_type to be alltoall or flex"),
        ({"recompute_granularity": "full"}, "recompute_granularity to be selective, or left out"),
        ({"moe_shared_expert_overlap": True}, "moe_shared_expert_overlap to be False"),
        ({"mtp_num_layers": 2}, "mtp_num_layers to be 1 or less"),
        ({"recompute_modules": ["mlp", "moe"]}, "recompute_modules to be without moe"),
        ({"bf16": False, "fp16": False}, "bf16 to be True, or fp16"),
    ],
)
def test_what_the_plans_of_layers_need_is_checked_before_the_start(options: dict[str, Any], words: str) -> None:
    model = {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall", "bf16": True, "fp16": False}
    run = RunOptions(Setup(pairs=True))
    check_options(SimpleNamespace(**model, overlap_moe_expert_parallel_comm=True), run)
    with pytest.raises(UserError, match=f"schedules that hide the all-to-all of experts need {words}"):
        check_options(SimpleNamespace(**{**model, **options}), run)


def test_one_stage_per_rank_is_refused() -> None:
    run, _ = parse_ours("--zero-bubble-schedule 1f1b --zero-bubble-overlap-experts".split())
    with pytest.raises(UserError, match="only with 2 or more stages per rank, .* got schedule 1f1b with one"):
        place_stages(run, SimpleNamespace(pipeline_model_parallel_size=2), None, 60.0)
