"""Refuse the phrases of scripts/prose.txt in the text files of this repository: one line per place found."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIST = ROOT / "scripts/prose.txt"
SUFFIXES = {".py", ".pyi", ".md", ".h", ".cpp", ".js", ".css", ".html", ".sh", ".toml", ".cff", ".yaml", ".yml", ".txt"}


def phrases() -> list[tuple[re.Pattern[str], str]]:
    """The list's expressions and what it suggests in their place."""
    lines = (line for line in LIST.read_text().splitlines() if line and not line.startswith("#"))
    rows = (line.rsplit(" -> ", 1) for line in lines)
    return [(re.compile(expression, re.IGNORECASE), instead) for expression, instead in rows]


def main(folders: list[str]) -> int:
    """Check the tracked files below ``folders``, or all; returns the exit status."""
    command = ["git", "-C", str(ROOT), "ls-files", "--", *folders]
    tracked = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    found = 0
    refused = phrases()
    for name in tracked:
        path = ROOT / name
        if path.suffix not in SUFFIXES or path == LIST:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for pattern, instead in refused:
                if match := pattern.search(line):
                    found += 1
                    print(f"{name}:{number}: {match[0]!r}; write: {instead}")
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
