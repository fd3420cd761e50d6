"""What the page is made of: a section for each bench, tables of columns, figures with their range."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

Figures = Mapping[str, Any]


class Column(NamedTuple):
    """A column of a table: its head, and what a row has there."""

    head: str
    cell: Callable[[Figures], str]


@dataclass(frozen=True)
class Section:
    """One bench on the page.

    ``digest`` takes from the bench's JSON what is shown, with its rows under ``"rows"``; ``words`` say of that and of
    the machine what was compared with what. Columns of ``excerpt`` are in the README too.
    """

    title: str
    digest: Callable[[Figures], dict[str, Any]]
    words: Callable[[Figures, Figures], str]
    columns: Callable[[Figures], Sequence[Column]]
    excerpt: tuple[str, ...] = ()


def measured(values: Sequence[float]) -> dict[str, float]:
    """The median of some rounds, and their range."""
    return {"median": median(values), "least": min(values), "most": max(values)}


def ratios(values: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Round by round."""
    return measured([value / other for value, other in zip(values, others, strict=True)])


def number(key: str, form: str) -> Callable[[Figures], str]:
    """A figure, or a dash where the row has none; with its range where it was measured."""

    def cell(row: Figures) -> str:
        value = row.get(key)
        if isinstance(value, Mapping):
            return f"{value['median']:{form}} ({value['least']:{form}} to {value['most']:{form}})"
        return "-" if value is None else f"{value:{form}}"

    return cell


def text(key: str) -> Callable[[Figures], str]:
    return lambda row: str(row[key])


def pick(content: Figures, *keys: str) -> dict[str, Any]:
    return {key: content[key] for key in keys}


def whose(name: str, machine: Figures) -> str:
    """A variant's name with who runs it."""
    for prefix, who in (
        ("stock ", f"megatron-core {machine['megatron_core']}"),
        ("torch ", f"torch.distributed.pipelining {machine['torch']}"),
    ):
        if name.startswith(prefix):
            return f"{name.removeprefix(prefix)}, {who}"
    return f"{name}, ours"


def fixed(*columns: Column) -> Callable[[Figures], Sequence[Column]]:
    return lambda _: columns
