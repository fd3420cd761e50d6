"""Random states are values, also where the tracker draws with generators, as it does for CUDA graphs."""

from __future__ import annotations

import pytest
import torch


class _Tracker:
    def __init__(self, state: object) -> None:
        self.states = {"model-parallel-rng": state}

    def get_states(self) -> dict[str, object]:
        return dict(self.states)

    def set_states(self, states: dict[str, object]) -> None:
        self.states = states


@pytest.mark.parametrize("is_generator", [True, False])
def test_what_was_drawn_is_drawn_again(monkeypatch: pytest.MonkeyPatch, is_generator: bool) -> None:
    from megatron.core import tensor_parallel

    from megatron.zero_bubble.engine.optimizer import random_state

    generator = torch.Generator()
    tracker = _Tracker(generator if is_generator else torch.get_rng_state())
    monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
    monkeypatch.setattr(tensor_parallel.random, "_get_cuda_rng_state", torch.get_rng_state)
    monkeypatch.setattr(tensor_parallel.random, "_set_cuda_rng_state", torch.set_rng_state)
    states = random_state.capture()
    first = torch.rand(3, generator=generator)
    random_state.restore(states)
    if is_generator:
        assert torch.equal(torch.rand(3, generator=generator), first)
        assert tracker.states["model-parallel-rng"] is generator, "graphs refer to it"
    else:
        assert torch.equal(tracker.states["model-parallel-rng"], states["rng_tracker_states"]["model-parallel-rng"])  # type: ignore[arg-type]
