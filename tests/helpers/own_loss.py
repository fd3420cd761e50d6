"""Train with a loss outside the model: the loop takes logits out of it, as loops for reinforcement learning and
distillation do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.helpers.parity import Outcome, train


def _forward_step(self: Any, batches: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    batch = {name: self.platform.to_device(tensor, self.device) for name, tensor in next(batches).items()}
    return model(batch["tokens"], batch["position_ids"], None), lambda output: _loss(batch, output)


def _loss(batch: dict[str, torch.Tensor], logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """The cross entropy of logits (b, s, v), which the model has transposed: so is their gradient in the model."""
    mask = batch["loss_mask"].view(-1).float()
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].view(-1), reduction="none")
    loss, num_tokens = (losses * mask).sum(), mask.sum().detach().to(torch.int32)
    return loss, num_tokens, {"lm loss": torch.stack((loss.detach(), num_tokens.float()))}


def train_on_logits(rank: int, flags: str, schedules: Sequence[str | None]) -> list[Outcome]:
    """See ``parity.train``; call it on a rank pool."""
    from pretrain import loop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Trainer, "_forward_step", _forward_step)
        return train(rank, flags, schedules)
