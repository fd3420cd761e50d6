"""The loss scale is read from the device when it has changed, and only then."""

from __future__ import annotations

import pytest
import torch

from megatron.zero_bubble.engine.optimizer.loss_scale import LossScale


def test_loss_scale_is_read_when_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    num_reads = 0
    item = torch.Tensor.item

    def counted(tensor: torch.Tensor) -> float:
        nonlocal num_reads
        num_reads += 1
        return item(tensor)

    monkeypatch.setattr(torch.Tensor, "item", counted)
    scale, known = torch.tensor([1024.0]), LossScale()
    assert [known.of(scale) for _ in range(3)] == [1024.0] * 3
    assert num_reads == 1
    scale = scale * 2.0  # as DynamicGradScaler grows
    assert [known.of(scale) for _ in range(2)] == [2048.0] * 2
    assert num_reads == 2
    scale.fill_(512.0)
    assert known.of(scale) == 512.0
