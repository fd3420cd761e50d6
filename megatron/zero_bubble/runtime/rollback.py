"""Taking an optimizer step back."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Protocol

import torch


class Rollback(Protocol):
    """How the optimizers of a rank come back to before their last step."""

    @property
    def num_bytes(self) -> int:
        """What is kept for it."""
        ...

    def undo(self) -> None:
        """Parameters, states and options as they were; gradients are not touched."""
        ...


class Snapshot:
    """Everything that the step of a torch optimizer overwrites, kept on its device until the step is validated.

    Exact for every optimizer whose state is in ``state`` and ``param_groups``, whatever its arithmetic. Inverting Adam
    instead loses bits, and for beta2 = 0.999 the second moment of an element without history comes out negative.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._options = [[_options(group) for group in optimizer.param_groups] for optimizer in self._optimizers]
        self._kept: list[tuple[torch.optim.Optimizer, torch.Tensor, torch.Tensor, dict[str, Any] | None]] = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    state = optimizer.state.get(parameter)
                    kept = None if state is None else {key: _copy(value) for key, value in state.items()}
                    self._kept.append((optimizer, parameter, parameter.detach().clone(), kept))

    @property
    def num_bytes(self) -> int:
        """Of parameters and states, in all."""
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
        for optimizer, options in zip(self._optimizers, self._options, strict=True):
            for group, as_before in zip(optimizer.param_groups, options, strict=True):
                group.update(as_before)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) for key, value in group.items() if key != "params"}


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else deepcopy(value)


ROLLBACKS = {"exact": Snapshot}
"""By the names of ``--zero-bubble-rollback``."""
