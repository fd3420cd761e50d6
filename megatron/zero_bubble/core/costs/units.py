"""Check figures, and convert them between numbers of stages."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Placement

MAX_FIGURE = 1e15
"""Largest accepted figure, in any unit; sums and products of smaller figures cannot overflow."""


def refuse_huge(**figures: object) -> None:
    """Raise ``UserError`` for a number above ``MAX_FIGURE``; other checks reject values that are not finite numbers."""
    for name, value in figures.items():
        if isinstance(value, (int, float)) and MAX_FIGURE < value < math.inf:
            raise UserError(f"{name} must be at most {MAX_FIGURE:g}; got {value!r}; give a smaller one")


def refuse_no_time(*figures: float | Sequence[float]) -> None:
    """Raise ``UserError`` if no pass takes any time, because all schedules are then equal."""
    if not any(any(figure) if isinstance(figure, Sequence) else figure for figure in figures):
        raise UserError("F, B or W must take some time; got 0 ms for all of them; give the times of a rank's passes")


def checked_figure(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise UserError(f"{name} must be a finite number, 0 or above; got {value!r}; give such a number")
    return float(value)


def positive_figure(name: str, value: object) -> float:
    refuse_huge(**{name: value})
    if not checked_figure(name, value):
        raise UserError(f"{name} must be above 0; got {value!r}")
    return float(value)  # type: ignore[arg-type]


def bytes_per_ms(name: str, gigabytes_per_s: float | None) -> float | None:
    """Convert the bandwidth that a flag gives; None stays None."""
    return None if gigabytes_per_s is None else positive_figure(name, gigabytes_per_s) * 1e6


def checked_share(name: str, value: object) -> float:
    share = checked_figure(name, value)
    if share > 1:
        raise UserError(f"{name} is a share, so it must be between 0 and 1; got {value!r}")
    return share


def checked_tokens(name: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise UserError(f"{name} must be a number of tokens, 1 or more; got {value!r:.60}; correct it")
    return value


def checked_figures(name: str, values: Sequence[object], of: str = "stage") -> tuple[float, ...]:
    return tuple(checked_figure(f"{name} of {of} {number}", value) for number, value in enumerate(values))


def check_same_length(owner: object, names: Sequence[str]) -> None:
    lengths = {name: len(getattr(owner, name)) for name in names}
    if len(set(lengths.values())) > 1:
        got = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise UserError(f"every list must have one figure per stage; {got}; give them the same length")


def spread(placement: Placement, whole: float) -> tuple[float, ...]:
    """Divide the figure of each rank (ms or memory) among its chunks: one figure per stage, in the same unit."""
    return tuple(whole / len(placement.stages_of(rank)) for rank in placement.stage_to_rank)


def recut(figures: tuple[float, ...], num_stages: int) -> tuple[float, ...]:
    """Convert one figure per stage to another number of stages of the same model."""
    finer, coarser = max(num_stages, len(figures)), min(num_stages, len(figures))
    if finer % coarser:
        raise UserError(
            f"figures for {len(figures)} stages cannot be converted to {num_stages}: one number must be a multiple of "
            "the other; measure or give one figure per stage"
        )
    parts = finer // coarser
    if num_stages >= len(figures):
        return tuple(figure / parts for figure in figures for _ in range(parts))
    return tuple(sum(figures[s * parts : (s + 1) * parts]) for s in range(num_stages))


BYTES = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
"""The bytes of every unit of memory, the largest first."""


def format_bytes(amount: float) -> str:
    """Format an amount in bytes with three digits and a unit."""
    for unit, size in BYTES.items():
        if amount >= size:
            return f"{amount / size:.3g} {unit}"
    return f"{amount:.0f} bytes"


def parse_bytes(text: str) -> int:
    """Parse ``60GiB`` into bytes; also KiB and MiB.

    Raises:
        UserError: for any other form.
    """
    match = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)(KiB|MiB|GiB)", text)
    if match is None or not 0 < float(match[1]) < math.inf:
        raise UserError(f"an amount of memory is written like 60GiB; got {text!r}; give a number with KiB, MiB or GiB")
    return int(float(match[1]) * BYTES[match[2]])


def parse_memory_limit(text: str) -> tuple[float, str]:
    """Parse ``1p`` or ``60GiB`` into an amount and its unit: p, KiB, MiB or GiB.

    Raises:
        UserError: for any other form.
    """
    match = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)(p|KiB|MiB|GiB)", text)
    if match is None or not 0 < float(match[1]) < math.inf:
        raise UserError(f"a memory limit is written like 1p (the peak of 1F1B) or 60GiB; got {text!r}")
    return float(match[1]), match[2]
