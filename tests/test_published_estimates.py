"""What docs/estimates.md says of published runs; that its tables are fresh is checked in ``test_docs.py``."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs/estimates.md"
ROW = re.compile(
    r"^\| (?P<model>[^|]+) \| (?P<gpus>\d+ \w+) \| (?P<precision>[^|]+) \|.*\| \**(?P<deviation>[+-][\d.]+)%\** "
    r"\| (?P<needed>\d+) of (?P<memory>\d+) \|"
)


def test_published_runs_fit_into_their_gpus() -> None:
    """By their estimated memory, of which they take at least a quarter."""
    found = [row.groupdict() for line in PAGE.read_text().splitlines() if (row := ROW.match(line))]
    shares = [int(row["needed"]) / int(row["memory"]) for row in found]
    assert len(shares) >= 30 and all(0.25 <= share <= 1 for share in shares)


def test_published_runs_are_estimated_within_15_percent() -> None:
    """Of several models, five GPUs and all precisions; all dense ones are."""
    found = [row.groupdict() for line in PAGE.read_text().splitlines() if (row := ROW.match(line))]
    assert len(found) >= 30
    near = [row for row in found if abs(float(row["deviation"])) <= 15]
    assert len(near) >= 30
    assert len({row["gpus"].split()[1] for row in near}) >= 5 and len({row["precision"] for row in near}) == 6
    dense = [row for row in found if row["model"].startswith(("Llama", "Nemotron", "GPT"))]
    assert len(dense) >= 20 and all(row in near for row in dense)
    on_64 = [row for row in near if row["model"] == "Llama 3.1 70B" and row["gpus"] == "64 H100"]
    assert [row["precision"] for row in on_64] == ["bf16", "FP8 with current scaling", "FP8 with delayed scaling"]
