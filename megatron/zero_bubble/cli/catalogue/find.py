"""The recipes of a folder: its shell scripts, and its YAML files of flags."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatron.zero_bubble.cli.catalogue.bridge import is_bridge, recipes_of_bridge
from megatron.zero_bubble.cli.catalogue.flag_file import gpus_of_tests, recipe_of_flag_file
from megatron.zero_bubble.cli.catalogue.recipe import Recipe
from megatron.zero_bubble.cli.catalogue.shell import SUFFIXES, recipes_of_script
from megatron.zero_bubble.core.errors import UserError

MARK = "--pipeline-model-parallel-size"
"""What a file of a job with a pipeline contains, unless it leaves that to files that it sources."""


def recipes_in(folder: str) -> Iterator[Recipe]:
    """Yield the recipes of a folder, in the order of their paths.

    Raises:
        UserError: there is no such folder.
    """
    root = Path(folder).resolve()
    if not root.is_dir():
        raise UserError(f"a catalogue is made of a folder with launch scripts; got {folder}; give a folder")
    if is_bridge(root):
        yield from recipes_of_bridge(root)
        return
    gpus = gpus_of_tests(root)
    for file in _files(root):
        if file.suffix in SUFFIXES:
            yield from recipes_of_script(file, root)
        elif (recipe := recipe_of_flag_file(file, root)) is not None:
            given = next((gpus[name] for name in (file.parent.name, file.stem) if name in gpus), None)
            yield recipe if given is None else replace(recipe, **given)


def _files(root: Path) -> Iterator[Path]:
    """The files with flags of a pipeline, without what is hidden."""
    for path, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for file in (Path(path) / name for name in sorted(names)):
            is_kind = file.suffix in (*SUFFIXES, ".yaml", ".yml") and file.is_file()
            if is_kind and MARK in file.read_text(encoding="utf-8", errors="replace"):
                yield file
