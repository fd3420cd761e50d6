"""Which hardware queues a job has, and what follows for its plans."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.zero_bubble.cli.job_runs import SEVERAL, job_queues, with_more_queues
from megatron.zero_bubble.core.errors import PlanError
from megatron.zero_bubble.core.schedules import build
from megatron.zero_bubble.planning.feasibility import Feasibility

MANY = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}


@pytest.mark.parametrize(
    ("tensor", "context", "gpu", "under_megatron", "number"),
    [
        (1, 1, "h100", True, 32),
        (2, 1, "h100", True, 1),
        (1, 2, "a100", True, 1),
        (2, 1, "h200", True, 1),
        (2, 2, "b200", True, 32),
        (2, 1, "h100", False, 32),
    ],
)
def test_megatron_wants_one_queue_before_blackwell(
    tensor: int, context: int, gpu: str, under_megatron: bool, number: int
) -> None:
    """Our own loop does not ask for it."""
    args: Any = SimpleNamespace(tensor_model_parallel_size=tensor, context_parallel_size=context)
    found = job_queues(args, gpu, under_megatron, MANY)
    assert found.number == number
    assert (found.several is None) is (number == 1)
    assert with_more_queues(Feasibility(found)) is None
    with pytest.raises(PlanError) as caught:
        Feasibility(found._replace(number=1)).check(build("breadth-first", num_ranks=4, num_microbatches=16))
    assert ("set it to" in str(caught.value)) is (number != 1)


def test_more_queues_are_a_choice_of_the_environment() -> None:
    args: Any = SimpleNamespace(tensor_model_parallel_size=1, context_parallel_size=1)
    own = {name: job_queues(args, "h100", True, {name: "1"}) for name in (*MANY, "NCCL_LAUNCH_ORDER_IMPLICIT")}
    more = with_more_queues(Feasibility(own["CUDA_DEVICE_MAX_CONNECTIONS"]))
    assert more is not None and more.queues is not None
    assert f"{more.queues.setting} {SEVERAL}" == "CUDA_DEVICE_MAX_CONNECTIONS is 32 CUDA_DEVICE_MAX_CONNECTIONS=32"
    assert with_more_queues(Feasibility(own["NCCL_LAUNCH_ORDER_IMPLICIT"])) is None
    assert with_more_queues(Feasibility()) is None
