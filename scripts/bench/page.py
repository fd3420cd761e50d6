"""The page of a run's figures: ``docs/BENCHMARKS.md``, and the same figures in the README, from JSON alone.

``docs/benchmarks.json`` has the figures of the run that the page shows. The README holds excerpts, each between a line
``<!-- bench: NAME -->`` and a line ``<!-- /bench -->``, which name the run. Nothing of this is edited by hand:

    bash scripts/bench.sh page                    again from docs/benchmarks.json
    bash scripts/bench.sh page runs/bench/RUN     from another run
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from bench import ranks
from bench.columns import Column, Figures
from bench.sections import SECTIONS
from megatron.zero_bubble.formats.files import json_object, read_file

OK = "ok"
CHART, RECORD = "scaling.svg", "run.json"
STORED, PAGE = Path("docs/benchmarks.json"), Path("docs/BENCHMARKS.md")
_BLOCK = re.compile(r"(<!-- bench: ([\w-]+) -->\n).*?(<!-- /bench -->)", re.DOTALL)


def main() -> None:
    """Write the page and the README's figures from stored ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, nargs="?", help=f"of a run; default: the one in {STORED}")
    folder = parser.parse_args().folder
    try:
        summary = summarize(folder) if folder else _read(ranks.ROOT / STORED)
    except ValueError as error:
        parser.error(str(error))
    if summary["quick"]:
        parser.error(
            f"the page shows full runs; {summary['run']} was a quick one; run scripts/bench.sh without --quick"
        )
    publish(summary, ranks.ROOT, (folder or ranks.ROOT / STORED.parent) / CHART)


def summarize(folder: Path) -> dict[str, Any]:
    """Of a run's JSON what the page shows."""
    record = _read(folder / RECORD)
    for bench in record["benches"]:
        if bench["status"] == OK:
            bench["figures"] = SECTIONS[bench["name"]].digest(_read(folder / f"{bench['name']}.json"))
    return record


def _read(path: Path) -> dict[str, Any]:
    return read_file(path, "figures of a run", json_object)


def publish(summary: dict[str, Any], root: Path, chart: Path) -> None:
    """Replace the stored summary, the page, the chart and the README's excerpts in the checkout at ``root``."""
    readme, stored_chart = root / "README.md", root / PAGE.parent / CHART
    texts = {root / PAGE: render(summary), readme: with_excerpts(readme.read_text(encoding="utf-8"), summary)}
    ranks.write(root / STORED, summary)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    if chart.exists() and chart.resolve() != stored_chart.resolve():
        shutil.copyfile(chart, stored_chart)


def render(summary: Figures) -> str:
    """The page as Markdown."""
    before, after = (" ".join(f"{load:.1f}" for load in summary["load_average"][when]) for when in ("before", "after"))
    machine = summary["machine"]
    lines = [
        "# Benchmarks",
        "",
        "Written by `bash scripts/bench.sh` from its JSON; run it again instead of editing.",
        "",
        "| | |",
        "|---|---|",
        f"| run | {summary['run']}{', quick: its figures mean nothing' if summary['quick'] else ''} |",
        f"| began | {summary['began']}, took {summary['seconds'] / 60:.1f} minutes |",
        f"| processor | {machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB |",
        f"| device | {machine['device']} |",
        f"| system | {machine['system']}, Python {machine['python']} |",
        f"| versions | torch {machine['torch']}, megatron-core {machine['megatron_core']} |",
        f"| commit | {machine['commit']} |",
        f"| load average before | {before} |",
        f"| load average after | {after} |",
    ]
    for bench in summary["benches"]:
        lines += ["", f"## {SECTIONS[bench['name']].title}", "", f"`{bench['command']}`, {bench['seconds']:.0f} s.", ""]
        lines += _section(bench, machine)
    return "\n".join(lines) + "\n"


def _section(bench: Figures, machine: Figures) -> Iterator[str]:
    if bench["status"] != OK:
        yield f"**Failed: {bench['status']}.** Its last lines:"
        yield from ("", *(f"    {line}" for line in bench["last_lines"]))
        return
    section, figures = SECTIONS[bench["name"]], bench["figures"]
    yield _wrapped(section.words(figures, machine))
    yield ""
    yield from _table(section.columns(figures), figures["rows"])


def _wrapped(words: str) -> str:
    """Every line of ``words`` as a paragraph, or an entry of a list, of the width of our texts."""
    lines = []
    for line in words.split("\n"):
        indent = "  " if line.startswith("* ") else ""
        lines += wrap(line, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]
    return "\n".join(lines)


def _table(columns: Sequence[Column], rows: Sequence[Figures]) -> Iterator[str]:
    yield _line([column.head for column in columns])
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield _line([column.cell(row) for column in columns])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def excerpts(summary: Figures) -> Mapping[str, str]:
    """What the README says of each bench that ran and has an excerpt."""
    found = {}
    for bench in summary["benches"]:
        section = SECTIONS[bench["name"]]
        if section.excerpt and bench["status"] == OK:
            figures = bench["figures"]
            columns = [column for column in section.columns(figures) if column.head in section.excerpt]
            source = f"Run {summary['run']} on {summary['machine']['processor']}"
            words = f"**{section.title}.** {section.words(figures, summary['machine'])}"
            words += f" {source} ([all figures]({PAGE}))."
            found[bench["name"]] = "\n".join([_wrapped(words), "", *_table(columns, figures["rows"])])
    return found


def with_excerpts(readme: str, summary: Figures) -> str:
    """The README with its blocks rewritten; those of benches that did not run, or failed, as they are."""
    texts = excerpts(summary)

    def rewritten(block: re.Match[str]) -> str:
        return f"{block[1]}\n{texts[block[2]]}\n\n{block[3]}" if block[2] in texts else block[0]

    return _BLOCK.sub(rewritten, readme)


def blocks(readme: str) -> dict[str, str]:
    """The README's blocks by the name of their bench."""
    return {
        block[2]: block[0].removeprefix(block[1]).removesuffix(block[3]).strip() for block in _BLOCK.finditer(readme)
    }


if __name__ == "__main__":
    main()
