"""The limit of host memory is checked before a run, from the shapes of the model."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.planning.job.arguments.checks import check
from megatron.zero_bubble.planning.job.arguments.parser import parse

JOB = (
    "--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --micro-batch-size 2 --train-iters 9 "
    "--lr 1e-3 --mock-data --pipeline-model-parallel-size 4 --zero-bubble-schedule zb-h2 --zero-bubble-offload all"
)
LAYER = 34 * 4096 * 2 * 4096
"""Bytes that a layer stores for a microbatch in bf16, without the scores of attention: 34 sbh."""


def checked(limit: int, flags: str = "--global-batch-size 32", world_size: int = 4, node_size: int = 4) -> None:
    """``limit`` is in KiB."""
    check(parse([*JOB.split(), "--zero-bubble-host-memory", f"{limit}KiB", *flags.split()]), world_size, node_size)


def refusal(limit: int, flags: str = "--global-batch-size 32", world_size: int = 4, node_size: int = 4) -> str:
    with pytest.raises(UserError) as caught:
        checked(limit, flags, world_size, node_size)
    assert caught.value.everywhere, "all ranks find the same"
    return str(caught.value)


def test_what_the_fullest_rank_moves_must_fit() -> None:
    """ZB-H2 on 4 ranks has 7 microbatches in flight on rank 0, with 2 layers each: 6 are on the host only, and one
    comes back and is there as well. With half of them, it is 3 and one.
    """
    need = 7 * 2 * LAYER // 1024
    checked(need)
    text = refusal(need - 1)
    assert text == (
        f"activations in host memory must fit in --zero-bubble-host-memory, {need - 1}KiB per rank; zb-h2 needs an "
        "estimated 14.9 GiB on pipeline rank 0, and 31.9 GiB on a node of 4 ranks; raise the limit, or lower the "
        "percentage of --zero-bubble-offload"
    )
    checked(4 * 2 * LAYER // 1024, "--global-batch-size 32 --zero-bubble-offload 50%")


@pytest.mark.parametrize(
    ("world_size", "node_size", "ranks"),
    [(4, 1, (0,)), (4, 2, (0, 1)), (8, 4, (0, 0, 1, 1)), (8, 2, (0, 0)), (8, 8, (0, 0, 1, 1, 2, 2, 3, 3))],
)
def test_a_node_has_the_sum_of_its_ranks(world_size: int, node_size: int, ranks: tuple[int, ...]) -> None:
    """With two replicas, those of a stage are neighbours. Ranks 0 to 3 have 7, 5, 3 and 0 microbatches on the host."""
    text = refusal(1024, f"--global-batch-size {16 * world_size // 4 * 2}", world_size, node_size)
    of_rank = {rank: 2 * LAYER * (7, 5, 3, 0)[rank] / 2**30 for rank in range(4)}
    found = re.search(r"and ([\d.]+) GiB on a node of (\d+) rank", text)
    assert found is not None and int(found[2]) == node_size
    assert float(found[1]) == pytest.approx(sum(of_rank[rank] for rank in ranks), rel=0.01)


def test_what_is_recomputed_is_not_moved() -> None:
    """Of 34 sbh, the MLP and its norm have 18."""
    text = refusal(
        1, "--global-batch-size 32 --recompute-granularity selective --recompute-modules mlp --disable-bias-linear"
    )
    assert f"estimated {14.875 * 16 / 34:.3g} GiB on pipeline rank 0" in text


def test_jobs_in_low_precision_are_not_refused() -> None:
    """The run knows better which copies there are."""
    args = parse([*JOB.split(), "--zero-bubble-host-memory", "1KiB", "--global-batch-size", "32"])
    args.fp8 = "hybrid"
    check(args, 4, 4)


def test_rows_of_experts_must_fit() -> None:
    """A token has as many rows as experts process it."""
    amounts = [
        float(re.findall(r"estimated ([\d.]+) GiB", refusal(1, f"--global-batch-size 32 --num-experts 8 {more}"))[0])
        for more in ("--moe-router-topk 1", "--moe-router-topk 2", "--moe-router-topk 4")
    ]
    assert 14.9 < amounts[0] < amounts[1] < amounts[2]
    assert amounts[2] - amounts[1] == pytest.approx(2 * (amounts[1] - amounts[0]), rel=0.02)


def test_limit_without_moves_is_rejected() -> None:
    assert "works only with offloading" in refusal(1, "--global-batch-size 32 --zero-bubble-offload none")


def test_jobs_of_megatron_lm_are_checked_with_equal_stages() -> None:
    """Megatron-LM's validated flags, which lack --recompute-activations."""
    checks = pytest.importorskip("megatron.zero_bubble.integration.megatron_lm.checks")
    args = parse([*JOB.split(), "--global-batch-size", "32"])
    check(args, 4, 4)
    del args.recompute_activations
    args.num_experts = None
    need = 7 * 2 * LAYER // 1024
    checks.check_offload(args, replace(args.zero_bubble, host_memory=f"{need}KiB"), args.source, 16, 4)
    with pytest.raises(UserError, match=r"estimated 14\.9 GiB on pipeline rank 0, and 31\.9 GiB on a node of 4 ranks"):
        checks.check_offload(args, replace(args.zero_bubble, host_memory=f"{need - 1}KiB"), args.source, 16, 4)
