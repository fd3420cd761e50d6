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
        "rng_tracker_states": {name: _value(state) for name, state in _of_tracker().items()},
        "device_rng_state": tensor_parallel.random._get_cuda_rng_state(),
    }


def restore(states: dict[str, Any]) -> None:
    random.setstate(states["random_rng_state"])
    numpy.random.set_state(states["np_rng_state"])
    torch.set_rng_state(states["torch_rng_state"])
    now = _of_tracker()
    for name, state in states["rng_tracker_states"].items():
        if isinstance(now.get(name), torch.Generator):
            now[name].set_state(state)
        else:
            now[name] = state
    tensor_parallel.get_cuda_rng_tracker().set_states(now)
    tensor_parallel.random._set_cuda_rng_state(states["device_rng_state"])


def _of_tracker() -> dict[str, Any]:
    return dict(tensor_parallel.get_cuda_rng_tracker().get_states())


def _value(state: Any) -> Any:
    """A state as a value; where CUDA graphs draw random numbers, the tracker has generators, which they refer to."""
    return state.get_state() if isinstance(state, torch.Generator) else state
