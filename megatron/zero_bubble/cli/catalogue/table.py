"""The catalogue as text, CSV, JSON or a page."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from html import escape
from importlib import resources

from megatron.zero_bubble.cli.catalogue.judge import BROKEN, GAINS, OUTCOMES, REFUSED, UNANSWERED, UNREAD, Row

ASSUMPTIONS = (
    "Scripts are read by a restricted bash that starts nothing, without arguments, with this shell's variables.",
    "Reasons repeat values of flags: read the table before you publish it.",
    "Times are estimates from the peaks and bandwidths of the GPU that a recipe names, or else that of --gpu.",
    "A gain below 2 % is within the error of estimates, and counts as none.",
    "Where a recipe gives no number of GPUs, or too few for its parallelism, the fewest are assumed.",
    "Without --search the best change is that of the quick advice, which plans schedules by name.",
    "A refused recipe has the gain that it would have if only the reason of the refusal were absent.",
)
"""What the figures assume."""
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Recipes</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
<h1>Recipes</h1>
{summary}
<ul class="soft">{assumptions}</ul>
{tables}
</html>
"""
_HEAD = ("recipe", "GPUs", "p x v, m", "idle", "best change", "gain", "option", "seconds")


def text_of(rows: Sequence[Row]) -> str:
    """One line per recipe that can gain something, or about which something is to know, and the numbers of all."""
    lines = []
    for row in _ordered(rows):
        if row.outcome in (GAINS, REFUSED, BROKEN, UNREAD, UNANSWERED):
            gains = f"{row.gain:.1%} with {row.flags}" if row.gain is not None else ""
            why = f"{row.outcome}: {row.reason}" if row.outcome != GAINS else ""
            idle = "" if row.idle is None else f"idle {row.idle:.1%}"
            lines.append("  ".join(part for part in (row.name, idle, gains, why) if part))
    return "\n".join([*lines, "", *summary_of(rows), ""])


def csv_of(rows: Sequence[Row]) -> str:
    """One row per recipe, with the fields of ``Row`` as columns."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(field.name for field in fields(Row))
    writer.writerows([_cell(value) for value in asdict(row).values()] for row in rows)
    return out.getvalue()


def json_of(rows: Sequence[Row]) -> str:
    """The rows and what they assume."""
    content = {"assumptions": ASSUMPTIONS, "outcomes": OUTCOMES, "recipes": [asdict(row) for row in rows]}
    return json.dumps(content, indent=1) + "\n"


def page_of(rows: Sequence[Row]) -> str:
    """A page with a table per outcome."""
    css = resources.files("megatron.zero_bubble.core.render") / "page" / "timeline.css"
    return _PAGE.format(
        style=css.read_text(encoding="utf-8"),
        summary="".join(f"<p>{escape(line)}</p>\n" for line in summary_of(rows)),
        assumptions="".join(f"<li>{escape(each)}</li>" for each in ASSUMPTIONS),
        tables="\n".join(_tables(_ordered(rows))),
    )


FORMATS: dict[str, Callable[[Sequence[Row]], str]] = {".html": page_of, ".csv": csv_of, ".json": json_of}
"""What writes a file, by the end of its name."""


def summary_of(rows: Sequence[Row]) -> Iterator[str]:
    """Yield sentences with the numbers of all recipes."""
    counts = Counter(row.outcome for row in rows)
    yield (
        f"{len(rows)} recipe{'s' * (len(rows) != 1)}: "
        + ", ".join(f"{counts[each]} {each}" for each in OUTCOMES if counts[each])
        + "."
    )
    known = [row.idle for row in rows if row.idle is not None]
    if known:
        idle = " and ".join(f"{sum(each >= least for each in known)} at least {least:.0%}" for least in (0.05, 0.1))
        yield f"Of {len(known)} pipelines, {idle} of the time are without work."
    for outcome in (REFUSED, BROKEN):
        options = Counter(row.option or "no flag" for row in rows if row.outcome == outcome)
        if options:
            yield (
                f"{outcome.capitalize()}: "
                + ", ".join(f"{name} {count}" for name, count in options.most_common())
                + "."
            )


def _tables(rows: Sequence[Row]) -> Iterator[str]:
    for outcome, meaning in OUTCOMES.items():
        own = [row for row in rows if row.outcome == outcome]
        if own:
            yield f"<h2>{escape(outcome)}: {len(own)}</h2>\n<p class=soft>{escape(meaning)}</p>"
            yield (
                "<div class=scroll><table>\n<tr>"
                + "".join(f"<th{_words(name)}>{name}</th>" for name in _HEAD)
                + "</tr>"
            )
            yield from (_line(row) for row in own)
            yield "</table></div>"


def _line(row: Row) -> str:
    cells = dict(zip(_HEAD, cells_of(row), strict=True))
    title = escape(row.reason or row.flags, quote=True)
    return f'<tr title="{title}">' + "".join(f"<td{_words(k)}>{escape(v)}</td>" for k, v in cells.items()) + "</tr>"


def cells_of(row: Row) -> tuple[str, ...]:
    """The cells of a recipe in a table, in the order of ``_HEAD``."""
    return (
        row.name,
        "" if row.gpus is None else f"{row.gpus} {row.gpu}{' (assumed)' if row.is_assumed else ''}",
        "" if row.stages is None else f"{row.ranks} x {row.stages}, {row.microbatches}",
        "" if row.idle is None else f"{row.idle:.1%}",
        row.change,
        "" if row.gain is None else f"{row.gain:.1%}",
        row.option,
        f"{row.seconds:.1f}",
    )


def _words(name: str) -> str:
    return ' class="words"' if name in ("best change", "option") else ""


def _ordered(rows: Sequence[Row]) -> list[Row]:
    """The rows that idle most first."""
    return sorted(rows, key=lambda row: -(row.idle or 0.0))


def _cell(value: object) -> object:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else value
