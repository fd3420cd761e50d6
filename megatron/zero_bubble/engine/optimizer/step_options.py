"""The options of an optimizer's parameter groups (learning rate, weight decay, ...) before and after a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch

ParamGroup = dict[str, Any]

_ABSENT = object()


class StepOptions:
    """Copies of the options in the parameter groups before and after a step.

    A step that is undone, repeated or delayed needs the options from its original time. Options that the job has set
    since then, for example with a learning-rate scheduler that does not wait for the validation, apply to the next step
    and are preserved.

    Args:
        optimizers: the torch optimizers of a rank.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._before: list[ParamGroup] = []
        self._after: list[ParamGroup] = []

    def keep(self) -> None:
        """Copy the options for a step that is taken now, or later with these options."""
        self._before = self._after = self._copies()

    def stepped(self) -> None:
        """Copy the options after the step, because some optimizers count steps in their groups."""
        self._after = self._copies()

    @contextlib.contextmanager
    def of_step(self) -> Iterator[None]:
        """Context with the options from before the step; afterwards, the job's later changes are applied again."""
        changes = [_changes(after, group) for after, group in zip(self._after, self._groups, strict=True)]
        for group, before in zip(self._groups, self._before, strict=True):
            _apply(group, _changes(group, before))
        yield
        for group, changed in zip(self._groups, changes, strict=True):
            _apply(group, changed)

    @property
    def _groups(self) -> list[ParamGroup]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _copies(self) -> list[ParamGroup]:
        return [{key: _copy(value) for key, value in group.items() if key != "params"} for group in self._groups]


def _changes(old: ParamGroup, new: ParamGroup) -> ParamGroup:
    """The options that differ from ``old`` to ``new``, as copies; ``_ABSENT`` marks removed ones."""
    keys = (old.keys() | new.keys()) - {"params"}
    pairs = {key: (old.get(key, _ABSENT), new.get(key, _ABSENT)) for key in keys}
    return {key: _copy(value) for key, (before, value) in pairs.items() if not _same(before, value)}


def _apply(group: ParamGroup, changes: ParamGroup) -> None:
    for key, value in changes.items():
        if value is _ABSENT:
            del group[key]
        elif isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
            group[key].copy_(value)  # optimizers may have a reference to the tensor
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
