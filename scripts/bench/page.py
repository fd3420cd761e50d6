"""The page of a run's figures, ``docs/benchmarks.md``, from JSON alone.

``docs/benchmarks.json`` has the figures of the run that the page shows; ``scripts/generate_docs.py`` takes the README's
results from it. Neither is edited by hand:

    bash scripts/bench.sh page                    from docs/benchmarks.json
    bash scripts/bench.sh page runs/bench/RUN     from another run
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from bench import ranks
from bench.sections import SECTIONS
from bench.tables import Figures
from megatron.zero_bubble.core.formats.files import json_object, read_file

OK = "ok"
CHART, RECORD = "scaling.svg", "run.json"
STORED, PAGE = Path("docs/benchmarks.json"), Path("docs/benchmarks.md")


def main() -> None:
    """Write the page from stored figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, nargs="?", help=f"folder of a run; default: the run in {STORED}")
    folder = parser.parse_args().folder
    try:
        summary = summarize(folder) if folder else _read(ranks.ROOT / STORED)
    except ValueError as error:
        parser.error(str(error))
    if summary["quick"]:
        parser.error(
            f"the page shows only full runs, got the quick run {summary['run']}; run scripts/bench.sh without --quick"
        )
    publish(summary, ranks.ROOT, (folder or ranks.ROOT / STORED.parent) / CHART)


def summarize(folder: Path) -> dict[str, Any]:
    """Extract from a run's JSON what the page shows."""
    record = _read(folder / RECORD)
    for bench in record["benches"]:
        if bench["status"] == OK:
            bench["figures"] = SECTIONS[bench["name"]].summary(_read(folder / f"{bench['name']}.json"))
    return record


def _read(path: Path) -> dict[str, Any]:
    return read_file(path, "figures of a run", json_object)


def publish(summary: dict[str, Any], root: Path, chart: Path) -> None:
    """Replace the stored summary, the page and the chart in the checkout at ``root``."""
    stored_chart = root / PAGE.parent / CHART
    ranks.write(root / STORED, summary)
    (root / PAGE).write_text(render(summary), encoding="utf-8")
    if chart.exists() and chart.resolve() != stored_chart.resolve():
        shutil.copyfile(chart, stored_chart)


_HEAD = """# Benchmarks

<!-- generated: by scripts/bench.sh, from benchmarks.json -->

Written by `bash scripts/bench.sh` from its JSON; run it again instead of editing.

| | |
|---|---|
| run | {run}{quickly} |
| began | {began}, took {minutes:.1f} minutes |
| processor | {machine[processor]}, {machine[cores]} cores, {machine[memory_gib]} GiB |
| device | {machine[device]} |
| system | {machine[system]}, Python {machine[python]} |
| versions | torch {machine[torch]}, megatron-core {machine[megatron_core]} |
| commit | {machine[commit]} |
| load average before | {before} |
| load average after | {after} |

A load average is the mean number of processes that ran or waited for a core, over the last 1, 5 and 15 minutes.
"""


def render(summary: Figures) -> str:
    """The page as Markdown."""
    load = {when: " ".join(f"{part:.1f}" for part in parts) for when, parts in summary["load_average"].items()}
    quickly = ", quick: its figures are meaningless" if summary["quick"] else ""
    parts = [_HEAD.format_map({**summary, **load, "quickly": quickly, "minutes": summary["seconds"] / 60})]
    for bench in summary["benches"]:
        section = SECTIONS[bench["name"]]
        parts.append(f"## {section.title}\n\n`{bench['command']}`, {bench['seconds']:.0f} s.\n")
        if bench["status"] == OK:
            words, table = section.text(bench["figures"], summary["machine"]), section.table(bench["figures"])
            parts.append(f"{_wrapped(words)}\n\n{_markdown(table)}\n")
        else:
            last_lines = "".join(f"    {line}\n" for line in bench["last_lines"])
            parts.append(f"**Failed: {bench['status']}.** Its last lines:\n\n{last_lines}")
    return _counted("\n".join([*parts, "<!-- end -->\n"]))


def report(bench: str, content: Figures, path: Path) -> None:
    """Write the results of ``bench`` as JSON, and print them as the page shows them."""
    section, content = SECTIONS[bench], {"bench": bench, "machine": ranks.machine(), **content}
    ranks.write(path, content)
    summary = section.summary(content)
    table = section.table(summary)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    print(f"\n{_wrapped(section.text(summary, content['machine']))}\n")
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _counted(text: str) -> str:
    """Replace each ``thread(s)`` behind a number by the singular or the plural."""
    return re.sub(r"\b(\d+) (\w+)\(s\)", lambda of: f"{of[1]} {of[2]}{'' if of[1] == '1' else 's'}", text)


def _wrapped(words: str) -> str:
    """Wrap every line of ``words``, a paragraph or an entry of a list, to 120 characters."""
    lines = []
    for line in words.split("\n"):
        indent = "  " if line.startswith("* ") else ""
        lines += wrap(line, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]
    return "\n".join(lines)


def _markdown(table: Sequence[Sequence[str]]) -> str:
    head, *rows = (f"| {' | '.join(cells)} |" for cells in table)
    return "\n".join([head, "|" + "---|" * len(table[0]), *rows])


if __name__ == "__main__":
    main()
