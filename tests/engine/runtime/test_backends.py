"""What a job's settings say about NCCL."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.engine.runtime.backends import hardware_queues, is_nccl


@pytest.mark.parametrize("name", ["nccl", "NCCL", "nccl2", "nccl-lazy", "nccl-legacy"])
def test_every_name_of_nccl_is_recognized(name: str) -> None:
    assert is_nccl(name)
    assert is_nccl(f"cpu:gloo,cuda:{name}")
    assert is_nccl(f"cuda:{name},cpu:gloo")


@pytest.mark.parametrize("name", ["gloo", "cpu:gloo", "cpu:gloo,cuda:gloo", "undefined", "mpi", "cpu:nccl,cuda:gloo"])
def test_other_backends_are_not_nccl(name: str) -> None:
    assert not is_nccl(name)


@pytest.mark.parametrize(
    ("environment", "number", "setting"),
    [
        ({}, 8, "CUDA_DEVICE_MAX_CONNECTIONS is not set, which means 8"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": ""}, 8, "CUDA_DEVICE_MAX_CONNECTIONS is not set, which means 8"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, 32, "CUDA_DEVICE_MAX_CONNECTIONS is 32"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, 1, "CUDA_DEVICE_MAX_CONNECTIONS is 1"),
        ({"NCCL_LAUNCH_ORDER_IMPLICIT": "0"}, 8, "CUDA_DEVICE_MAX_CONNECTIONS is not set, which means 8"),
        ({"NCCL_LAUNCH_ORDER_IMPLICIT": ""}, 8, "CUDA_DEVICE_MAX_CONNECTIONS is not set, which means 8"),
        (
            {"NCCL_LAUNCH_ORDER_IMPLICIT": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "32"},
            1,
            "NCCL_LAUNCH_ORDER_IMPLICIT is 1, which has the same effect as one queue",
        ),
    ],
)
def test_settings_that_let_streams_share_queues_are_found(
    environment: dict[str, str], number: int, setting: str
) -> None:
    found = hardware_queues(environment)
    assert (found.number, found.setting) == (number, setting)
    assert bool(found.what) == (number == 1)
