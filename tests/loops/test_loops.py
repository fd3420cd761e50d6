"""Loops of RL and post-training frameworks give the same numbers and weights under every schedule, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble.core.errors import UserError
from tests.helpers.megatron_lm import Checkout, checkouts
from tests.helpers.ranks import RankPool
from tests.loops.checkouts import check_on
from tests.loops.compare import SCHEDULES, differences, outcomes
from tests.loops.groups import initialize, plain_steps
from tests.loops.loops import LOOPS, batches, passes
from tests.loops.models import build
from tests.loops.varied import KINDS

FIXED = ("verl", "slime, loss per token", "slime, mean of microbatches", "nemo-rl", "ms-swift")
OTHERS = tuple(loop for loop in LOOPS if loop not in FIXED)
BY_FRAMEWORK = {"by_framework": True}
QUICK = {
    "verl": ("zb-h1", "zb-v"),
    "slime, loss per token": ("zb-h1", "interleaved-1f1b"),
    "nemo-rl": ("zb-v",),
    "ms-swift": ("zb-h1", "zb-v"),
    "slime, packed": ("zb-v",),
}


@pytest.mark.parametrize(
    ("loop", "schedules"),
    [*QUICK.items(), *(pytest.param(loop, tuple(SCHEDULES), marks=pytest.mark.full) for loop in LOOPS)],
)
def test_a_loop_equals_stock(ranks: RankPool, loop: str, schedules: tuple[str, ...]) -> None:
    results = ranks.run(2, outcomes, loop, schedules, timeout=120)
    assert differences(results, schedules) == []


@pytest.mark.parametrize(
    ("loop", "schedules"),
    [
        ("ms-swift", ("zb-v",)),
        *(pytest.param(loop, tuple(SCHEDULES), marks=pytest.mark.full) for loop in ("verl", "slime, packed")),
    ],
)
def test_a_loop_that_builds_its_own_chunks_equals_stock(ranks: RankPool, loop: str, schedules: tuple[str, ...]) -> None:
    results = ranks.run(2, outcomes, loop, schedules, BY_FRAMEWORK, timeout=120)
    assert differences(results, schedules) == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("names", "num_ranks"),
    [(FIXED, 2), (OTHERS, 2), (KINDS, 2), (KINDS, 4)],
    ids=("fixed lengths", "packed loops", "different lengths", "different lengths on four ranks"),
)
@pytest.mark.parametrize("checkout", checkouts(), ids=str)
def test_all_loops_equal_stock_on_other_versions(
    checkout: Checkout, names: Sequence[str], num_ranks: int, tmp_path: Path
) -> None:
    rows: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in names}
    if names == FIXED:
        rows["verl, whose chunks a framework builds"] = "verl", BY_FRAMEWORK
    check_on(checkout, rows, tmp_path, num_ranks)


def second_model(rank: int) -> list[str]:
    """The refusals of a second model in the same process, in evaluation and in training."""
    from megatron.core import tensor_parallel

    import megatron.zero_bubble

    megatron.zero_bubble.apply("zb-h1")
    try:
        initialize(None)
        tensor_parallel.model_parallel_cuda_manual_seed(7)
        supported, other = (
            build(None, "plain", is_trained=False, use_ring_exchange_p2p=rings) for rings in (False, True)
        )
        for chunk in (*supported, *other):
            chunk.config.finalize_model_grads_func = None
        plain_steps(supported, batches(2, 0))
        said = []
        for how in ({"forward_only": True}, {}):
            with pytest.raises(UserError) as caught:
                passes(other, batches(2, 0), lambda _batch, logits: (logits.mean(), {}), **how)
            said.append(str(caught.value))
        plain_steps(supported, batches(2, 0))
        return said
    finally:
        megatron.zero_bubble.revert()


def test_the_options_of_every_model_are_checked(ranks: RankPool) -> None:
    for said in ranks.run(2, second_model):
        assert len(said) == 2
        assert all(each.startswith("zero-bubble schedules need use_ring_exchange_p2p=False, because ") for each in said)
