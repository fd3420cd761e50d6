"""Clipping gradients by their global norm, as megatron-core does, when the norm is known."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.optimizer import MegatronOptimizer, clip_grads


class Clipping:
    """Clips the gradients of one rank.

    Args:
        optimizer: its configuration has the largest norm.
        parts: the optimizers that have the gradients.
        device: the device of the gradients.
    """

    def __init__(self, optimizer: MegatronOptimizer, parts: Sequence[MegatronOptimizer], device: torch.device) -> None:
        self._optimizer, self._parts, self._device = optimizer, parts, device

    def clips(self, norm: float) -> bool:
        """Whether gradients of this norm are clipped. NaN does not count."""
        clip = self._optimizer.config.clip_grad
        # On the host, the same operations give the same bits, but do not wait for the passes.
        return clip > 0 and bool(clip / (_total(norm, torch.device("cpu")) + 1.0e-6) < 1.0)

    def clip(self, norm: float) -> None:
        """Clip the gradients, if the configuration says so."""
        clip = self._optimizer.config.clip_grad
        for part in self._parts:
            parameters = [] if part.is_stub_optimizer else part.get_parameters()
            if parameters and clip > 0:
                clip_grads.clip_grad_by_total_norm_fp32(
                    parameters,
                    clip,
                    _total(norm, self._device),
                    part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
                )


def _total(norm: float, device: torch.device) -> float | torch.Tensor:
    """The norm as megatron-core clips by it: since 0.17, TransformerEngine's kernels take a tensor."""
    if getattr(clip_grads, "multi_tensor_scale_tensor_impl", None) is None:
        return norm
    return torch.tensor([norm], dtype=torch.float32, device=device)
