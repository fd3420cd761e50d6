"""Parts of the report of a bench: a table of columns, and a text about its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

Figures = Mapping[str, Any]
Getter = Callable[[Figures], Any]


@dataclass(frozen=True)
class Column:
    """One figure per row: ``getter`` takes it from a row of the bench's JSON, and the summary has it as ``key``.

    ``unit`` is the format of the figure. A column without a name is in the summary only.
    """

    name: str
    key: str
    unit: str = ""
    getter: Getter | None = None

    def value(self, row: Figures) -> Any:
        """The figure of a row of the bench's JSON; None if the row has none."""
        return self.getter(row) if self.getter else row.get(self.key)

    def cell(self, row: Figures) -> str:
        """Format the figure of a row of the summary, with its range or quartiles if it has any; a dash for None."""
        value, ends = row.get(self.key), row.get(f"{self.key}_quartiles", ())
        if isinstance(value, Mapping):
            value, ends = value["median"], (value["least"], value["most"])
        if value is None:
            return "-"
        middle, *shown = (format(figure, self.unit).replace("%", " %") for figure in (value, *ends))
        return f"{middle} ({' to '.join(shown)})" if shown else middle


@dataclass(frozen=True)
class Section:
    """The report of one bench.

    ``settings`` and ``rows`` are taken from the bench's JSON for its summary. ``words`` is a format string for the
    settings, the ``machine`` and ``facts`` about both.
    """

    title: str
    settings: Getter
    rows: Getter
    columns: Sequence[Column] | Callable[[Sequence[Figures]], Sequence[Column]]
    words: str
    facts: Getter = lambda _: {}

    def summary(self, content: Figures) -> dict[str, Any]:
        """Extract from a bench's JSON what the page shows."""
        rows = self.rows(content)
        columns = self._columns(rows)
        return self.settings(content) | {
            "rows": [{column.key: column.value(row) for column in columns} for row in rows]
        }

    def text(self, summary: Figures, machine: Figures) -> str:
        """The text that describes the comparison."""
        return self.words.format_map({**summary, "machine": machine, **self.facts(summary)})

    def table(self, summary: Figures) -> list[list[str]]:
        """The cells, heads first, of the columns that have a name."""
        rows = summary["rows"]
        columns = [column for column in self._columns(rows) if column.name]
        return [[column.name for column in columns], *([column.cell(row) for column in columns] for row in rows)]

    def _columns(self, rows: Sequence[Figures]) -> Sequence[Column]:
        return self.columns(rows) if callable(self.columns) else self.columns


def measured(values: Sequence[float]) -> dict[str, float]:
    """The median and the range of values, one per round."""
    return {"median": median(values), "least": min(values), "most": max(values)}


def rounds(key: str, scale: float = 1.0) -> Getter:
    """Getter of a figure measured in every round."""
    return lambda row: measured([scale * value for value in row[key]])


def ratio(key: str, other: str) -> Getter:
    """Getter of a ratio in every round, to another figure of the same round or to one for all rounds."""

    def get(row: Figures) -> dict[str, float]:
        base = row[other] if isinstance(row[other], list) else [row[other]] * len(row[key])
        return measured([value / by for value, by in zip(row[key], base, strict=True)])

    return get


def settings(*keys: str) -> Getter:
    """Getter of these settings, which the bench's JSON has at its top level, in every result, or with the machine."""

    def get(content: Figures) -> dict[str, Any]:
        first = (content.get("results") or [{}])[0]
        return {key: {**content["machine"], **first, **content}[key] for key in keys}

    return get


def named(label: str, key: str) -> Getter:
    """Getter of rows that are stored by name; each row gets its name, as ``label``, and the machine."""
    return lambda content: [{**row, label: name, "machine": content["machine"]} for name, row in content[key].items()]
