"""The overlaps of tensor parallelism with which TransformerEngine's weight gradients cannot be deferred."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from megatron.zero_bubble.core.errors import UserError

OVERLAPS = {
    "ub_bulk_wgrad": "tp_comm_bulk_wgrad",
    "ub_bulk_dgrad": "tp_comm_bulk_dgrad",
    "ub_overlap_ag_dgrad": "tp_comm_overlap_ag",
}
"""TransformerEngine's names, with Megatron's option names. The first overlaps W with a reduction at B; the others
gather W's operands into a buffer that the next layer overwrites."""


def enabled_overlaps(value_of: Callable[[str, bool], bool]) -> tuple[str, ...]:
    """Return Megatron's names of the overlaps that are enabled; for the argument, see ``check_overlaps``."""
    return tuple(option for name, option in OVERLAPS.items() if value_of(name, False))


def disabled(options: Iterable[str]) -> tuple[str, ...]:
    """Return the flags that disable some of Megatron's options in ``OVERLAPS``."""
    return tuple(f"--disable-{option.replace('_', '-')}" for option in options)


def check_overlaps(value_of: Callable[[str, bool], bool]) -> None:
    """Reject overlaps that are enabled.

    Args:
        value_of: returns the value of one of TransformerEngine's options, given its name and what a missing one counts
            as.

    Raises:
        UserError: those that are enabled, with the flags that disable them.
    """
    enabled = enabled_overlaps(value_of)
    if enabled:
        got = ", ".join(f"{option}=True" for option in enabled)
        flags = " ".join(disabled(enabled))
        raise UserError(
            "TransformerEngine's weight gradients can be deferred only if their operands are not in the buffers of "
            f"--tp-comm-overlap; got {got}; set {'it' if len(enabled) == 1 else 'them'} to False ({flags})"
        )
