"""Undo an optimizer step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any, Protocol

import torch

from megatron.zero_bubble.core.errors import UserError

Optimizers = Sequence[torch.optim.Optimizer]


class Rollback(Protocol):
    """Undoes the last step of the torch optimizers of a rank."""

    def is_safe(self) -> bool:
        """Whether the next step can be undone."""
        ...

    def keep(self) -> None:
        """Save the state that ``undo`` needs; called right before a step."""
        ...

    def forget(self) -> None:
        """Drop the saved state; called when the step is validated."""
        ...

    def undo(self) -> None:
        """Restore parameters and states to before the step.

        The options of the parameter groups must be those of the step (``StepOptions``). Gradients are not changed.
        """
        ...

    @property
    def num_bytes(self) -> int:
        """Size of the saved state in bytes."""
        ...


class SnapshotRollback:
    """A ``Rollback`` that keeps a copy of everything that a step overwrites, on its device, until it is validated.

    It is exact for every optimizer with its state in ``state`` and ``param_groups``. Adam with fp32 states needs 12
    bytes for each element that this rank steps (with a distributed optimizer, only its shard), at the same time as the
    activations of the next iteration's first forwards.
    """

    def __init__(self, optimizers: Optimizers) -> None:
        self._optimizers = list(optimizers)
        self.forget()

    def is_safe(self) -> bool:
        return True

    def keep(self) -> None:
        self.forget()
        for optimizer, _, parameter in _parameters(self._optimizers):
            state = optimizer.state.get(parameter)
            kept = None if state is None else {k: v if _is_tensor(v) else deepcopy(v) for k, v in state.items()}
            self._states.append((optimizer, parameter, kept))
        kept_tensors = [v for *_, state in self._states for v in (state or {}).values() if _is_tensor(v)]
        for tensor in (*(parameter.detach() for _, parameter, _ in self._states), *kept_tensors):
            # A few calls copy all tensors; they need one device and dtype per call.
            self._tensors.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        for key, tensors in self._tensors.items():
            self._copies[key] = [torch.empty_like(tensor) for tensor in tensors]
            torch._foreach_copy_(self._copies[key], tensors)

    def forget(self) -> None:
        # Per parameter, the keys of its state before the step, with the tensors themselves and copies of other values.
        self._states: list[tuple[torch.optim.Optimizer, torch.Tensor, dict[str, Any] | None]] = []
        self._tensors: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        self._copies: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for copies in self._copies.values() for t in copies)

    @torch.no_grad()
    def undo(self) -> None:
        for key, tensors in self._tensors.items():
            torch._foreach_copy_(tensors, self._copies[key])
        for optimizer, parameter, kept in self._states:
            if kept is None:
                optimizer.state.pop(parameter, None)
                continue
            # The state itself stays the same object, and so do tensors that the step changed in place.
            state = optimizer.state[parameter]
            state.clear()
            state.update(kept)
        self.forget()


class InverseAdamRollback:
    """A ``Rollback`` that inverts AdamW from the gradients; needs no extra memory, and is correct up to rounding only.

    With m' = b1 m + (1 - b1) g and v' = b2 v + (1 - b2) g^2, an old moment is a difference, so it loses the bits by
    which the new gradient exceeds the history. A result below the rounding error of that difference is set to zero,
    because a second moment could otherwise become negative (and then NaN). A step is not safe if its gradient exceeds
    the history so much that few bits remain. (arXiv 2401.10241, appendix, has the formulas without these precautions.)

    Raises:
        UserError: an optimizer is not torch's AdamW as configured by Megatron.
    """

    _LEFT = 2.0**-20
    """A moment below this fraction of the minuend is set to zero (fp32 rounds at 2^-24)."""

    _MOST = 2.0**12
    """Maximum ratio of g^2 to the history in a safe step; 12 of 24 bits of v remain."""

    def __init__(self, optimizers: Optimizers) -> None:
        self._optimizers = list(optimizers)
        for optimizer in self._optimizers:
            odd = [
                key for key in ("amsgrad", "maximize", "capturable") if any(g.get(key) for g in optimizer.param_groups)
            ]
            if not isinstance(optimizer, torch.optim.AdamW) or odd:
                raise UserError(
                    "--zero-bubble-post-validation inverse supports only torch's AdamW without amsgrad, maximize and "
                    f"capturable; got {' '.join([type(optimizer).__name__, *odd])}; use "
                    "--zero-bubble-post-validation exact"
                )

    @torch.no_grad()
    def is_safe(self) -> bool:
        """Whether enough bits of every second moment with a history can be recovered after the next step."""
        exceeding = []
        for optimizer, group, parameter in _parameters(self._optimizers):
            state = optimizer.state.get(parameter)
            if state and parameter.grad is not None:
                beta2 = group["betas"][1]
                history = state["exp_avg_sq"] * (beta2 * self._MOST)
                exceeding.append((((1 - beta2) * parameter.grad.square() > history) & (history > 0)).any())
        return not exceeding or not bool(torch.stack(exceeding).any())

    def keep(self) -> None:
        """Do nothing: ``undo`` uses the gradients, which are zeroed only after the validation."""

    def forget(self) -> None:
        """Do nothing: no state is saved."""

    @property
    def num_bytes(self) -> int:
        """Always 0: no state is saved."""
        return 0

    @torch.no_grad()
    def undo(self) -> None:
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
"""The values of ``--zero-bubble-post-validation``."""


def _parameters(optimizers: Optimizers) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any], torch.Tensor]]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield optimizer, group, parameter


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
