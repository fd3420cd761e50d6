"""What ``plan`` and ``compare`` print for two hundred settings must not change unnoticed."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.core.search.loops import compiled
from tests.helpers.settings import LAYER_COSTS, LAYERS, is_quick, settings

ROOT = Path(__file__).parents[2]
STORED = ROOT / "tests/golden/settings.json"
PARTS = {True: 36, False: 16}
"""The tests among which the quick settings are divided, and the others."""


def _figures(content: dict[str, Any]) -> dict[str, Any]:
    """The figures that show at a glance what has changed; the digests cover the rest."""
    if "rows" in content:
        rows = {f"{row['schedule']}, {row['placement']}": round(row["span_ms"], 6) for row in content["rows"]}
        return {"lower_bound_ms": content["lower_bound_ms"], "span_ms": rows}
    keys = "makespan_ms", "span_ms", "peak_activation", "peak_memory", "lower_bound_ms", "host_peak"
    return {key: content[key] for key in keys if key in content}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _answer(command: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code = main(command.split())
    text, refused = capsys.readouterr()
    if code:
        return {"refused": refused.strip()}
    assert main([*command.split(), "--format", "json"]) == 0
    content = json.loads(capsys.readouterr().out)
    timeless = json.dumps({key: value for key, value in content.items() if key != "planning_seconds"})
    text = re.sub(r"planned in .* s", "planned", text)
    return _figures(content) | {"text": _digest(text), "json": _digest(timeless)}


@pytest.mark.skipif(compiled() is None, reason="without compiled loops the search has a smaller budget")
@pytest.mark.parametrize(
    ("quick", "part"),
    [
        *(pytest.param(True, part, marks=pytest.mark.full if part else ()) for part in range(PARTS[True])),
        *(pytest.param(False, part, marks=pytest.mark.full) for part in range(PARTS[False])),
    ],
)
def test_settings_are_answered_as_before(
    quick: bool, part: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``UPDATE_GOLDEN=1`` rewrites the answers; then say in the commit why they are better."""
    (tmp_path / LAYERS).write_text(json.dumps(LAYER_COSTS))
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it
    asked = [command for command in settings() if is_quick(command) is quick]
    answers = {command: _answer(command, capsys) for command in asked[part :: PARTS[quick]]}
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    if os.environ.get("UPDATE_GOLDEN"):
        stored |= answers
        STORED.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
    assert answers == {command: stored.get(command) for command in answers}


def test_every_stored_setting_is_asked() -> None:
    asked = list(settings())
    assert len(asked) == len(set(asked)) >= 200
    assert set(json.loads(STORED.read_text())) == set(asked)
