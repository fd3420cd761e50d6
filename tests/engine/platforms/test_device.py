"""Tests of the device of a rank's stages, with and without parameters."""

from __future__ import annotations

import pytest
import torch

from megatron.zero_bubble.engine.platforms.cuda import CudaPlatform
from megatron.zero_bubble.engine.platforms.device import device_of

EMPTY = torch.nn.Identity()


def test_stage_without_parameters_uses_the_device_of_another_stage() -> None:
    assert device_of([EMPTY, torch.nn.Linear(1, 1, device="meta")]) == torch.device("meta")


@pytest.mark.parametrize(("has_gpu", "device"), [(False, "cpu"), (True, "cuda:3")])
def test_rank_without_parameters_uses_the_current_device(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, device: str
) -> None:
    monkeypatch.setattr(CudaPlatform, "available", lambda self: has_gpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert device_of([EMPTY]) == torch.device(device)
