"""The overlaps of tensor parallelism with which TransformerEngine's weight gradients cannot be deferred.

They are switched off in the linears that a schedule splits: one overlaps W with a reduction at B, and the others gather
what W needs into a buffer that the next layer overwrites.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

OVERLAPS = {
    "ub_bulk_wgrad": "tp_comm_bulk_wgrad",
    "ub_bulk_dgrad": "tp_comm_bulk_dgrad",
    "ub_overlap_ag_dgrad": "tp_comm_overlap_ag",
}
"""TransformerEngine's names, with Megatron's option names."""
OF_QUEUE, OF_PASSES = tuple(OVERLAPS)[:1], tuple(OVERLAPS)[1:]
"""The first decides whether a linear has a queue for its weight gradients; its passes read the others."""
_ENGINE = "transformer_engine"


def enabled_overlaps(options: Any) -> list[str]:
    """Return those that a job enables, by TransformerEngine's names.

    Args:
        options: the flags of a job, or the configuration of a model.
    """
    has_engine = (getattr(options, "transformer_impl", None) or _ENGINE) == _ENGINE
    is_on = has_engine and bool(getattr(options, "tp_comm_overlap", False))
    return [name for name, option in OVERLAPS.items() if is_on and getattr(options, option, False)]


def switched_off(names: Collection[str]) -> str:
    """Return the line about overlaps that are switched off, given by TransformerEngine's names."""
    options = " and ".join(OVERLAPS[name] for name in names)
    verb = "is" if len(names) == 1 else "are"
    return f"{options} {verb} switched off, because W must not find its operands in the buffers of --tp-comm-overlap"
