"""Where weight gradients go: what is known of a model chunk belongs to that chunk."""

from __future__ import annotations

import pytest
import torch

from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.wgrad import accumulate as gradients


class Wrapped(torch.nn.Module):
    """Looks like a wrapper whose gradient hooks only autograd can call."""

    def no_sync(self) -> None:
        raise AssertionError("never called")


def test_a_chunk_at_the_address_of_another_is_not_that_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "id", lambda _chunk: 0, raising=False)  # a freed address is used again
    accumulator = gradients.GradAccumulator()
    accumulator.watch([torch.nn.Linear(2, 2)])
    with pytest.raises(UserError, match="DistributedDataParallel"):
        accumulator.watch([Wrapped()])
