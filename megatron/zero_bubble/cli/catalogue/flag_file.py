"""Jobs whose flags stand in a YAML file, one per line, as in Megatron-LM's functional tests.

Such a file is a list of lines ``--flag: value`` below a name. YAML proper needs a package, and this does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

from megatron.zero_bubble.cli.catalogue.recipe import Recipe, with_paths
from megatron.zero_bubble.core.costs.devices import DEVICES

_SECTION = re.compile(r"^(\w+):\s*$")
_FLAG = re.compile(r"^\s+[\"']?(--[\w-]+)[\"']?:\s*(.*?)\s*$")
_CASE = re.compile(r"test_case:\s*\[([^\]]*)\]")
_PROGRAM = re.compile(r"TRAINING_SCRIPT_PATH=([\w./-]+\.py)")
_SPECS = Path("tests/test_utils/recipes")
"""Where Megatron-LM's tests say how many GPUs they have, in one folder per GPU."""


def recipe_of_flag_file(file: Path, root: Path) -> Recipe | None:
    """The recipe of the first section with flags; None if there is none."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        if (head := _SECTION.match(line)) is not None:
            section = head[1]
        elif (flag := _FLAG.match(line)) is not None:
            found.setdefault(section, []).extend(_words(flag[1], flag[2]))
    if not found:
        return None
    return Recipe(str(file.relative_to(root)), with_paths(next(iter(found.values()))))


def gpus_of_tests(root: Path) -> dict[str, dict[str, Any]]:
    """The GPUs of Megatron-LM's functional tests by their names, as fields of a recipe; empty in other folders."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted((root / _SPECS).glob("*/*.yaml"), key=lambda file: file.parent.name, reverse=True):
        text = file.read_text(encoding="utf-8", errors="replace")
        sizes = dict(re.findall(r"^  (nodes|gpus): (\d+)\s*$", text, re.MULTILINE))
        per_node = int(sizes.get("gpus", 8))
        gpu = file.parent.name if file.parent.name in DEVICES else None
        program = _PROGRAM.search(text)
        given = {
            "program": PurePath(program[1]).name if program else "",
            "gpus": int(sizes.get("nodes", 1)) * per_node,
            "gpus_per_node": per_node,
            "gpu": gpu,
        }
        found |= {name.strip(): given for names in _CASE.findall(text) for name in names.split(",")}
    return found


def _words(flag: str, value: str) -> Iterator[str]:
    """The words of a flag: none behind a switch, several of a list."""
    value = value.partition(" #")[0].strip()
    quoted = len(value) > 1 and value[0] in "\"'" and value[-1] == value[0]
    value = value[1:-1] if quoted else value
    if value != "false":
        yield flag
    if value not in ("", "true", "false"):
        listed = value.startswith("[") and value.endswith("]") and not re.search(r"[*+]", value)
        yield from re.split(r"[,\s]+", value[1:-1].strip()) if listed else [value]
