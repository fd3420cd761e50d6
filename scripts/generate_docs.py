"""Write the parts of README.md and docs/, and the pictures, that come from the code or from a bench's JSON.

A generated part stands between a line ``<!-- generated: NAME -->`` and a line ``<!-- end -->``. A part of a sentence
stands between the same marks within one line.

    python scripts/generate_docs.py            rewrite all of them
    python scripts/generate_docs.py --check    change nothing; exit code 1 where one is stale
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from site_parts import (
    architecture,
    cost_keys,
    estimates,
    facts,
    flags,
    fork,
    gpu,
    models,
    offload,
    plan_keys,
    recipes,
    refusals,
    schedules,
    slices,
    stored,
    unmeasured,
    vocabulary,
    wall_clock,
)

ROOT = Path(__file__).parent.parent
PARTS: dict[str, Callable[[], str]] = {
    **schedules.PARTS,
    **slices.PARTS,
    **vocabulary.PARTS,
    **offload.PARTS,
    **flags.PARTS,
    **fork.PARTS,
    **plan_keys.PARTS,
    **cost_keys.PARTS,
    **facts.PARTS,
    **refusals.PARTS,
    **stored.PARTS,
    **architecture.PARTS,
    **gpu.PARTS,
    **unmeasured.PARTS,
    **wall_clock.PARTS,
    **estimates.PARTS,
    **recipes.PARTS,
    **models.PARTS,
}
"""What writes each part, by its name."""
_PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_WORDS = re.compile(r"(<!-- generated: ([\w-]+) -->)[^\n]+(<!-- end -->)")


def main(argv: list[str]) -> int:
    """Rewrite or check every page; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="report stale parts instead of rewriting them")
    check = parser.parse_args(argv).check
    texts = {page: generated(page.read_text(encoding="utf-8")) for page in pages()}
    pictures = {**schedules.PICTURES, **slices.PICTURES, **vocabulary.PICTURES, **offload.PICTURES}
    texts |= {ROOT / "docs" / name: draw() for name, draw in pictures.items()}
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if not check:
        for path in stale:
            path.write_text(texts[path], encoding="utf-8")
    if stale:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        print(f"generate_docs.py: {'stale' if check else 'rewritten'}: {names}")
    return int(check and bool(stale))


def pages() -> list[Path]:
    """The files that may have generated parts."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def generated(page: str) -> str:
    """The page with its generated parts as they are now; KeyError for an unknown name."""
    page = _PART.sub(lambda part: f"{part[1]}\n{_part(part[2]).strip()}\n\n{part[3]}", page)
    return _WORDS.sub(lambda part: f"{part[1]}{_part(part[2])}{part[3]}", page)


@cache
def _part(name: str) -> str:
    return PARTS[name]()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
