"""The options of an optimizer's parameter groups (learning rate, weight decay, ...) around one step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch

Options = dict[str, Any]

_ABSENT = object()


class StepOptions:
    """What a step finds in its parameter groups beside the parameters, and what it leaves there.

    A step that is repeated or taken late needs the options of its own time. Those that the job has set since, for
    example by a learning-rate scheduler that does not wait for the validation, are for the next step and stay.

    Args:
        optimizers: the torch optimizers of a rank.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._before: list[Options] = []
        self._after: list[Options] = []

    def keep(self) -> None:
        """The step comes now, or later with the options of now."""
        self._before = self._after = self._copies()

    def stepped(self) -> None:
        """The step has been taken; some optimizers count it in their groups."""
        self._after = self._copies()

    @contextlib.contextmanager
    def of_step(self) -> Iterator[None]:
        """Within, the options are those before the step; afterwards, those that the job has changed are back."""
        changes = [_changes(after, group) for after, group in zip(self._after, self._groups, strict=True)]
        for group, before in zip(self._groups, self._before, strict=True):
            _apply(group, _changes(group, before))
        yield
        for group, changed in zip(self._groups, changes, strict=True):
            _apply(group, changed)

    @property
    def _groups(self) -> list[Options]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _copies(self) -> list[Options]:
        return [{key: _copy(value) for key, value in group.items() if key != "params"} for group in self._groups]


def _changes(old: Options, new: Options) -> Options:
    """What makes ``new`` of ``old``; copies, so that nothing changes them later."""
    keys = (old.keys() | new.keys()) - {"params"}
    pairs = {key: (old.get(key, _ABSENT), new.get(key, _ABSENT)) for key in keys}
    return {key: _copy(value) for key, (before, value) in pairs.items() if not _same(before, value)}


def _apply(group: Options, changes: Options) -> None:
    for key, value in changes.items():
        if value is _ABSENT:
            del group[key]
        elif isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
            group[key].copy_(value)  # optimizers may hold the tensor itself
        else:
            group[key] = value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value if value is _ABSENT else deepcopy(value)
