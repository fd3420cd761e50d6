"""The progress of a training loop, recorded instead of printed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pretrain.report import Progress


class RecordedProgress(Progress):
    """Progress that stores every reported value instead of logging it."""

    def __init__(self, train_iters: int) -> None:
        super().__init__(reporting=False, train_iters=train_iters)
        self.losses: list[str] = []
        self.grad_norms: list[str] = []
        self.loss_scales: list[float] = []
        self.num_zeros: list[float | None] = []
        self.iteration = 0

    def iterations(self, done: Sequence[Any], bubble: Any = None) -> None:
        norms = [metrics.grad_norm for metrics in done]
        self.loss_scales += [metrics.loss_scale for metrics in done]
        self.num_zeros += [metrics.num_zeros for metrics in done]
        self.grad_norms += ["skipped" if norm is None else float(norm).hex() for norm in norms]

    def evaluation(self, _iteration: int, split: str, loss: float | None) -> None:
        self.losses.append(f"{split} {None if loss is None else loss.hex()}")

    def say(self, _text: str) -> None:
        return None
