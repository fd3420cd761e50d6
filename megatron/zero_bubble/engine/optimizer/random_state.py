"""Captures and restores all random states of a rank."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from megatron.core import tensor_parallel


def capture() -> dict[str, Any]:
    """The states of Python, numpy, torch, Megatron's tracker and the device; later draws do not change the value."""
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": numpy.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
        "device_rng_state": tensor_parallel.random._get_cuda_rng_state(),
    }


def restore(states: dict[str, Any]) -> None:
    random.setstate(states["random_rng_state"])
    numpy.random.set_state(states["np_rng_state"])
    torch.set_rng_state(states["torch_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["rng_tracker_states"])
    tensor_parallel.random._set_cuda_rng_state(states["device_rng_state"])
