"""Write the parts of README.md and docs/ that come from the code or from a bench's JSON.

A generated part stands between a line ``<!-- generated: NAME -->`` and a line ``<!-- end -->``.

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

from site_parts import architecture, flags, refusals, schedules, stored

ROOT = Path(__file__).parent.parent
PARTS: dict[str, Callable[[], str]] = {
    **schedules.PARTS,
    **flags.PARTS,
    **refusals.PARTS,
    **stored.PARTS,
    **architecture.PARTS,
}
"""What writes each part, by its name."""
_PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main(argv: list[str]) -> int:
    """Rewrite or check every page; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="report stale parts instead of rewriting them")
    check = parser.parse_args(argv).check
    stale = []
    for page in pages():
        before = page.read_text(encoding="utf-8")
        after = generated(before)
        if after != before:
            stale.append(str(page.relative_to(ROOT)))
            if not check:
                page.write_text(after, encoding="utf-8")
    if stale:
        print(f"generate_docs.py: {'stale' if check else 'rewritten'}: {', '.join(stale)}")
    return int(check and bool(stale))


def pages() -> list[Path]:
    """The files that may have generated parts."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def generated(page: str) -> str:
    """The page with its generated parts as they are now; KeyError for an unknown name."""
    return _PART.sub(lambda part: f"{part[1]}\n{_part(part[2]).strip()}\n\n{part[3]}", page)


@cache
def _part(name: str) -> str:
    return PARTS[name]()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
