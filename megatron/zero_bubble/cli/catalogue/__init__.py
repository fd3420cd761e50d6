"""``zero-bubble catalogue``: what every recipe of a folder would gain, or why it cannot."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatron.zero_bubble.cli.catalogue.answers import SECONDS, SECONDS_OF_SEARCHES, rows_of
from megatron.zero_bubble.cli.catalogue.find import MARK, recipes_in
from megatron.zero_bubble.cli.catalogue.judge import Row
from megatron.zero_bubble.cli.catalogue.table import ASSUMPTIONS, FORMATS, text_of
from megatron.zero_bubble.cli.hardware import add_gpu
from megatron.zero_bubble.cli.progress import progress
from megatron.zero_bubble.core.errors import UserError


def add_catalogue(verb: argparse.ArgumentParser) -> None:
    """Add the flags of ``catalogue``."""
    verb.description = (
        "Give every recipe of a folder to the dry run and to the quick advice: its idle time, the best change, or the "
        "option or the error that stands in the way. Recipes are shell scripts, YAML files with flags, and those of a "
        "checkout of Megatron-LM or Megatron-Bridge. Scripts start nothing; recipes of Megatron-Bridge are Python, and "
        "are run: give only checkouts that you trust."
    )
    verb.add_argument("folders", nargs="+", metavar="FOLDER", help="a folder with launch scripts, or a checkout")
    add_gpu(verb, "GPU of the recipes that do not name one")
    verb.add_argument(
        "--output",
        action="append",
        default=[],
        metavar="FILE",
        help=f"write the table, too; the name ends in {' or '.join(FORMATS)}, and the flag can be repeated",
    )
    verb.add_argument(
        "--only", default="", metavar="TEXT", help="judge only recipes whose names contain it (default: all)"
    )
    verb.add_argument(
        "--search",
        action="store_true",
        help="give the advice with searches, about a minute per recipe, for jobs without the options that refuse it",
    )
    verb.set_defaults(command=catalogue)


def catalogue(options: argparse.Namespace) -> str:
    """Judge all recipes, and write the tables.

    Raises:
        UserError: a folder that is none, or a file that cannot be written.
    """
    files = [Path(name) for name in options.output]
    if wrong := next((file for file in files if file.suffix not in FORMATS), None):
        raise UserError(f"--output takes files that end in {', '.join(FORMATS)}; got {wrong}; rename it")
    if wrong := next((file for file in files if not file.parent.is_dir()), None):
        raise UserError(f"--output takes files in a folder that exists; got {wrong}; make its folder")
    rows = list(_rows(options))
    if not rows:
        where = ", ".join(options.folders)
        raise UserError(f"a catalogue needs files that contain {MARK}; got none in {where}; give another folder")
    for file in files:
        try:
            file.write_text(FORMATS[file.suffix](rows), encoding="utf-8")
        except OSError as error:
            raise UserError(f"{file} cannot be written: {error.strerror}; give another file") from error
    return "\n".join([text_of(rows), *ASSUMPTIONS, *(f"Wrote {file}." for file in files), ""])


def _rows(options: argparse.Namespace) -> Iterator[Row]:
    for folder in options.folders:
        name = Path(folder).resolve().name
        asked = [(recipe.name, recipe) for recipe in recipes_in(folder) if options.only in recipe.name]
        seconds = SECONDS_OF_SEARCHES if options.search else SECONDS
        with progress("judging", asked) as (each, _):
            rows = rows_of(each, options.gpu, seconds, searches=options.search)
            yield from (replace(row, name=f"{name}/{row.name}") for row in rows)
