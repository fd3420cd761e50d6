"""Tests of the playground's page of precomputed settings."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path

import pytest

from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.cli.playground import static


def test_page_has_plans_figures_and_loads_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static, "_RANKS", (4,))
    monkeypatch.setattr(static, "_MULTIPLES", (2,))
    assert main(["playground", "--static", str(tmp_path / "page")]) == 0
    assert capsys.readouterr().out == f"Wrote {tmp_path / 'page/index.html'}; open it in a browser.\n"
    page = (tmp_path / "page/index.html").read_text()
    assert not [word for word in (" src=", "@import", "url(", "http://", "https://") if word in page]
    (line,) = [line for line in page.splitlines() if line.startswith("const CATALOGUE = ")]
    cases = json.loads(line.removeprefix("const CATALOGUE = ").removesuffix(";"))["cases"]
    assert [*cases] == ["equal 4 2", "messages 4 2", "llama-8b 4 2", "llama-70b 4 2"]
    rows = {row["id"]: row for row in json.loads(gzip.decompress(base64.b64decode(cases["messages 4 2"])))}
    words = "--num-ranks 4 --num-microbatches 8 --forward-ms 10 --backward-ms 12 --wgrad-ms 7 --comm-ms 2".split()
    assert main(["plan", "--schedule", "zb-h2", *words, "--message-ms", "1", "--format", "json"]) == 0
    printed, row = json.loads(capsys.readouterr().out), rows["zb-h2"]
    assert {key: row["plan"]["plan"][key] for key in ("makespan_ms", "idle_rate_span", "peak_activation")} == {
        key: printed[key] for key in ("makespan_ms", "idle_rate_span", "peak_activation")
    }
    assert row["drawing"]["order"] == printed["order"] and not row["plan"]["limit"]["kept"]
    assert rows["1f1b"]["plan"]["limit"]["kept"], "the limit is 1F1B's memory"


def test_static_page_has_no_job_and_needs_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for words, sentence in (
        (["--config", "configs/llama_8b.yaml"], "--static has settings of its own, not those of a job"),
        ([], "cannot be written"),
    ):
        assert main(["playground", "--static", str(tmp_path / "file"), *words]) == 2
        assert sentence in capsys.readouterr().err
