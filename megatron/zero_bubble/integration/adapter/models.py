"""The models of one process that run under one pipeline in turn, such as a policy and its reference."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_attr_wrapped_model

from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.integration.adapter.chunks import check_chunks
from megatron.zero_bubble.integration.adapter.prepared import PreparedPlan


class Models:
    """Which models have run, in the order of their first iterations, and for which plans their options were checked.

    A model is known by its first chunk, and its options by its configuration, which a job may copy for every call.
    Neither is kept alive.
    """

    def __init__(self) -> None:
        self._numbers: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        self._count = 0
        self._checked: list[tuple[weakref.ref[Any], set[Hashable]]] = []
        self._sent: weakref.WeakKeyDictionary[torch.nn.Module, set[Hashable]] = weakref.WeakKeyDictionary()
        self._placed: weakref.WeakKeyDictionary[torch.nn.Module, Placement] = weakref.WeakKeyDictionary()

    def number(self, chunk: torch.nn.Module) -> int:
        """The number of the model with this first chunk, counted from 0; the same on all ranks of the pipeline."""
        if chunk not in self._numbers:
            self._numbers[chunk] = self._count
            self._count += 1
        return self._numbers[chunk]

    def check_chunks(self, group: dist.ProcessGroup, prepared: PreparedPlan, chunks: Sequence[torch.nn.Module]) -> None:
        """Check that chunks are the stages of a plan: a collective call in the first iteration of a model.

        Raises:
            UserError: see ``chunks.check_chunks``.
        """
        model = get_attr_wrapped_model(chunks[0], "pre_process", return_model_obj=True)
        placement = prepared.schedule.placement
        if self._placed.get(model) != placement:
            check_chunks(group, prepared.schedule.name, prepared.stages, chunks)
            self._placed[model] = placement

    def sends_first(self, chunk: torch.nn.Module, outputs: Hashable) -> bool:
        """Whether the model with this first chunk has never been asked for these outputs of its stages before."""
        before = self._sent.setdefault(chunk, set())
        is_first = outputs not in before
        before.add(outputs)
        return is_first

    def is_unchecked(self, config: Any, plan: Hashable) -> bool:
        """Whether the options of a model have not been checked for a plan, which is named by its key."""
        return plan not in self._plans_of(config)

    def mark_checked(self, config: Any, plan: Hashable) -> None:
        """Called when a plan is found to support the options of a model."""
        self._plans_of(config).add(plan)

    def forget_checks(self, plan: Hashable) -> None:
        """Called when there is a new plan of this key, which may support other options."""
        for _, plans in self._checked:
            plans.discard(plan)

    def _plans_of(self, config: Any) -> set[Hashable]:
        """The plans that support a configuration. It has no hash, and equal ones may belong to different models."""
        self._checked = [each for each in self._checked if each[0]() is not None]
        for reference, plans in self._checked:
            if reference() is config:
                return plans
        self._checked.append((weakref.ref(config), set()))
        return self._checked[-1][1]
