"""A norm over groups of features, as Mamba has it after its scan."""

from __future__ import annotations

import torch


class RMSNorm(torch.nn.Module):
    """Divides each group of ``group_size`` features by its root mean square; gated by ``silu(z)`` if ``z`` is given."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: object = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype))
        self._eps, self._group_size, self._norm_before_gate = eps, group_size or hidden_size, norm_before_gate

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        gate = None if z is None else torch.nn.functional.silu(z.float())
        of_groups = x.float()
        if gate is not None and not self._norm_before_gate:
            of_groups = of_groups * gate
        of_groups = of_groups.unflatten(-1, (-1, self._group_size))
        normed = of_groups * torch.rsqrt(of_groups.square().mean(-1, keepdim=True) + self._eps)
        y = normed.flatten(-2) * self.weight.float()
        return (y * gate if gate is not None and self._norm_before_gate else y).to(x.dtype)
