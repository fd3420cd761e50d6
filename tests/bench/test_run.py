"""Tests of a run of all benches: within its time budget, and complete even if a bench fails."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bench import page, ranks, run
from bench.run import FULL, ON_GPUS, QUICK, Bench
from bench.sections import SECTIONS

ROOT = Path(__file__).parents[2]
FAKES = {
    "works": "import sys, pathlib; pathlib.Path(sys.argv[-1]).write_text('{}'); print('fine')",
    "fails": "print('one'); print('two'); raise SystemExit('the last word')",
    "forgets": "print('nothing written')",
    # Ignores SIGTERM, as does its child; both must be killed.
    "hangs": (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal, time; "
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder, from which Python can import the package ``fakes``."""
    (tmp_path / "fakes").mkdir()
    for name, text in FAKES.items():
        (tmp_path / f"fakes/{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_full_run_is_expected_to_take_less_than_20_minutes() -> None:
    assert sum(bench.expected_s for bench in FULL) <= 19.5 * 60
    assert sum(bench.expected_s for bench in QUICK) <= 2 * 60


@pytest.mark.parametrize("benches", [(*FULL, *ON_GPUS), QUICK], ids=["full", "quick"])
def test_every_section_of_the_page_has_a_bench(benches: tuple[Bench, ...]) -> None:
    names = [bench.name for bench in benches]
    on_gpus = {bench.name for bench in ON_GPUS}
    assert len(names) == len(set(names))
    assert {*names, *on_gpus} == SECTIONS.keys()


@pytest.mark.parametrize("bench", [*FULL, *ON_GPUS, *QUICK], ids=lambda bench: f"{bench.name}-{bench.expected_s:g}")
def test_benches_parse_their_arguments(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    script = importlib.import_module(f"bench.{bench.module}")
    monkeypatch.setattr(sys, "argv", [bench.module, *shlex.split(bench.arguments), "--output", "here.json"])
    assert script._parse().output == Path("here.json")


def test_benches_named_in_documents_are_modules() -> None:
    texts = [path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))]
    named = {name for text in texts for name in re.findall(r"scripts/bench\.sh ([a-z]\w*)", text)}
    assert {"peer_schedules", "real_compute"} <= named
    assert all(importlib.util.find_spec(f"bench.{name}") for name in named), named


def test_failing_bench_does_not_affect_the_others(folder: Path) -> None:
    benches = [Bench(name, name, "--some 'thing else'", 5) for name in ("fails", "forgets", "works")]
    record = run.run(benches, folder, quick=True, package="fakes")
    fails, forgets, works = record["benches"]
    assert fails["status"] == "exit code 1" and fails["last_lines"] == ["one", "two", "the last word"]
    assert forgets["status"] == "exit code 0, nothing written" and forgets["last_lines"] == ["nothing written"]
    assert works["status"] == page.OK and "last_lines" not in works
    assert works["command"] == "bash scripts/bench.sh works --some 'thing else'"
    assert (folder / "works.log").read_text() == "fine\n"
    assert record["machine"]["device"].startswith(("cpu", "cuda"))


@pytest.mark.full  # waits for the limit of ten seconds
def test_hanging_bench_is_killed_with_its_children(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "timeout_s", 10.0)  # enough for two starts of Python on a busy machine
    monkeypatch.setattr(run, "_GRACE_S", 1.0)
    record = run.run([Bench("hangs", "hangs", "", 5)], folder, quick=True, package="fakes")
    assert record["benches"][0]["status"] == "timed out"
    said = record["benches"][0]["last_lines"]
    assert len(said) == 1 and said[0].isdecimal(), f"it must have started its child; got {said}"
    child = Path("/proc") / said[0]
    assert not child.exists() or "State:\tZ" in (child / "status").read_text()


def test_run_name_must_be_unused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    command = [sys.executable, "-m", "bench.run", "--quick", "--folder", str(tmp_path), "--name", "mine"]
    result = subprocess.run(command, cwd=ROOT, env=ranks.environment(), capture_output=True, text=True, check=False)
    assert result.returncode == 2 and "mine is in" in result.stderr


def test_only_full_runs_are_published(tmp_path: Path) -> None:
    # An incomplete record, so that an attempt to render the page would fail.
    (tmp_path / page.RECORD).write_text(json.dumps({"run": "it", "quick": True, "benches": []}))
    command = [sys.executable, "-m", "bench.page", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, env=ranks.environment(), capture_output=True, text=True, check=False)
    assert result.returncode == 2 and "the page shows only full runs" in result.stderr


@pytest.mark.full
@pytest.mark.timeout(900)
def test_quick_run_completes(tmp_path: Path) -> None:
    """Run all benches at small sizes; the checkout must not change."""
    before = (ROOT / "README.md").read_text()
    command = [sys.executable, "-m", "bench.run", "--quick", "--folder", str(tmp_path), "--name", "it"]
    environment = ranks.environment() | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    text = (tmp_path / "it/benchmarks.md").read_text()
    assert all(f"## {SECTIONS[bench.name].title}" in text for bench in QUICK)
    assert (ROOT / "README.md").read_text() == before
    real = json.loads((tmp_path / "it/real-compute.json").read_text())["results"][0]["variants"]
    for variant in real.values():
        assert variant["bound_over_predicted_stock"] <= variant["predicted_time_over_stock"]
