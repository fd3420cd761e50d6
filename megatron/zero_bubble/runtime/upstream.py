"""What the versions of megatron-core do not agree on, read off the functions themselves.

The minors 0.13 to 0.20 differ here in arguments that came or went and in the name of one class, never in what an
argument means. :mod:`megatron.zero_bubble.patching.seams` says which minors were checked.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron.core import process_groups_config


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def known(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Those of the arguments that this version's function has."""
    return {name: value for name, value in arguments.items() if name in _parameters(function)}


def process_group_collection() -> Any:
    """An empty collection of process groups: of core's own type, which 0.13 and 0.14 call otherwise."""
    names = ("ProcessGroupCollection", "GradFinalizeProcessGroups", "ModelCommProcessGroups")
    return next(getattr(process_groups_config, name) for name in names if hasattr(process_groups_config, name))()


def models_process_groups() -> Any:
    """Megatron's global process groups as a model takes them; None where models ask for each of them themselves."""
    for name in ("ProcessGroupCollection", "ModelCommProcessGroups"):
        if hasattr(process_groups_config, name):
            return getattr(process_groups_config, name).use_mpu_process_groups()
    return None
