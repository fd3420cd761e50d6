"""Captures and restores what the checks of losses in forwards change in Megatron's rerun state machine."""

from __future__ import annotations

import sys
from copy import copy, deepcopy
from typing import Any

_CHANGED = (
    "validation_counts",
    "rerun_requested",
    "checkpoint_requested",
    "restart_again_requested",
    "continue_requested",
    "failed_validation_call",
    "initial_result",
    "suspicious_node",
    "suspicious_device",
    "large_value_counts",
    "max_values",
    "saved_results",
)


def capture() -> dict[str, Any]:
    """The state of the machine; later checks do not change the value. Empty for a job without the machine."""
    machine = _machine()
    kept = {name: copy(machine[name]) for name in _CHANGED if name in machine}
    return kept | ({"stats": deepcopy(machine["stats"])} if "stats" in machine else {})


def restore(state: dict[str, Any]) -> None:
    _machine().update(state)


def _machine() -> dict[str, Any]:
    module = sys.modules.get("megatron.core.rerun_state_machine")
    machine = getattr(module, "_GLOBAL_RERUN_STATE_MACHINE", None)
    return {} if machine is None else vars(machine)
