"""Undoing an optimizer step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any, Protocol

import torch

from megatron.zero_bubble.errors import UserError

Optimizers = Sequence[torch.optim.Optimizer]


class Rollback(Protocol):
    """How the torch optimizers of a rank come back to before their last step."""

    def is_safe(self) -> bool:
        """Whether the step that comes can be undone."""
        ...

    def keep(self) -> None:
        """Right before a step: keep what ``undo`` needs."""
        ...

    def forget(self) -> None:
        """The step was right: keep nothing any more."""
        ...

    def undo(self) -> None:
        """Parameters and states as they were. The options of the groups must be those of the step (``StepOptions``);
        gradients are not touched.
        """
        ...

    @property
    def num_bytes(self) -> int:
        """What is kept now."""
        ...


class SnapshotRollback:
    """Keeps everything that a step overwrites, on its device, until the step is validated.

    Exact for every optimizer whose state is in ``state`` and ``param_groups``, whatever its arithmetic: 12 bytes per
    element for Adam with fp32 states, of those that this rank steps (a distributed optimizer has its part only), beside
    the activations of the next iteration's first forwards.
    """

    def __init__(self, optimizers: Optimizers) -> None:
        self._optimizers = list(optimizers)
        self._kept: list[tuple[torch.optim.Optimizer, torch.Tensor, torch.Tensor, dict[str, Any] | None]] = []

    def is_safe(self) -> bool:
        """Always."""
        return True

    def keep(self) -> None:
        """See ``Rollback``."""
        self._kept = []
        for optimizer, _, parameter in _parameters(self._optimizers):
            state = optimizer.state.get(parameter)
            kept = None if state is None else {key: _copy(value) for key, value in state.items()}
            self._kept.append((optimizer, parameter, parameter.detach().clone(), kept))

    def forget(self) -> None:
        """See ``Rollback``."""
        self._kept = []

    @property
    def num_bytes(self) -> int:
        """See ``Rollback``."""
        tensors = [value for *_, before, state in self._kept for value in (before, *(state or {}).values())]
        return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))

    @torch.no_grad()
    def undo(self) -> None:
        """See ``Rollback``."""
        for optimizer, parameter, before, kept in self._kept:
            parameter.copy_(before)
            if kept is None:
                optimizer.state.pop(parameter, None)
                continue
            state = optimizer.state[parameter]
            for key in [key for key in state if key not in kept]:
                del state[key]
            for key, value in kept.items():
                if isinstance(value, torch.Tensor) and isinstance(state.get(key), torch.Tensor):
                    state[key].copy_(value)
                else:
                    state[key] = value
        self.forget()


class InverseAdamRollback:
    """Computes AdamW backwards from the gradients, which are kept anyway: no memory, right to rounding only.

    With m' = b1 m + (1 - b1) g and v' = b2 v + (1 - b2) g^2, an old moment comes out as a difference, so it loses the
    bits by which the new gradient exceeds the history. What is left of a moment below the rounding of that difference
    is taken for zero: a second moment would come out negative (and a NaN of it). A step whose gradient exceeds the
    history so far that the rest has few bits is not safe (arXiv 2401.10241, appendix, has the formulas without this).

    Raises:
        UserError: an optimizer that is not torch's AdamW as Megatron makes it.
    """

    _LEFT = 2.0**-20
    """A moment smaller than this part of what is subtracted from is taken for zero (fp32 rounds at 2^-24)."""

    _MOST = 2.0**12
    """How many times a safe step's g^2 may exceed the history: 12 of 24 bits of v are left."""

    def __init__(self, optimizers: Optimizers) -> None:
        self._optimizers = list(optimizers)
        for optimizer in self._optimizers:
            odd = [
                key for key in ("amsgrad", "maximize", "capturable") if any(g.get(key) for g in optimizer.param_groups)
            ]
            if not isinstance(optimizer, torch.optim.AdamW) or odd:
                raise UserError(
                    "--zero-bubble-rollback inverse computes torch's AdamW backwards; this run has "
                    f"{' '.join([type(optimizer).__name__, *odd])}; use --zero-bubble-rollback exact"
                )

    @torch.no_grad()
    def is_safe(self) -> bool:
        """Whether enough is left of every second moment that has a history."""
        exceeding = []
        for optimizer, group, parameter in _parameters(self._optimizers):
            state = optimizer.state.get(parameter)
            if state and parameter.grad is not None:
                beta2 = group["betas"][1]
                history = state["exp_avg_sq"] * (beta2 * self._MOST)
                exceeding.append((((1 - beta2) * parameter.grad.square() > history) & (history > 0)).any())
        return not exceeding or not bool(torch.stack(exceeding).any())

    def keep(self) -> None:
        """Nothing: gradients are zeroed after the validation."""

    def forget(self) -> None:
        """Nothing was kept."""

    @property
    def num_bytes(self) -> int:
        """None."""
        return 0

    @torch.no_grad()
    def undo(self) -> None:
        """See ``Rollback``."""
        for optimizer, group, parameter in _parameters(self._optimizers):
            if parameter.grad is None:
                continue
            state, grad = optimizer.state[parameter], parameter.grad
            (beta1, beta2), count = group["betas"], float(state["step"])
            mean, square = state["exp_avg"], state["exp_avg_sq"]
            denominator = (square.sqrt() / math.sqrt(1 - beta2**count)).add_(group["eps"])
            parameter.addcdiv_(mean, denominator, value=group["lr"] / (1 - beta1**count))
            parameter.div_(1 - group["lr"] * group["weight_decay"])
            for moment, new, beta in ((mean, grad, beta1), (square, grad.square(), beta2)):
                rest = moment - new * (1 - beta)
                moment.copy_(torch.where(rest.abs() < self._LEFT * moment.abs(), 0.0, rest)).div_(beta)
            square.clamp_(min=0)
            state["step"] -= 1


ROLLBACKS: dict[str, type[SnapshotRollback | InverseAdamRollback]] = {
    "exact": SnapshotRollback,
    "inverse": InverseAdamRollback,
}
"""By the names of ``--zero-bubble-rollback``."""


def _parameters(optimizers: Optimizers) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any], torch.Tensor]]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield optimizer, group, parameter


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else deepcopy(value)
