"""Tests of a part's run: no step can stop or delay the others, and every kind of failure is reported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench import ranks
from gpu_day import run, shared_nccl
from gpu_day.steps import NEEDS_GPU, OK, PARTS, SKIPPED, Part, Step

ROOT = Path(__file__).parents[2]
WRITES = "import sys, pathlib; pathlib.Path(sys.argv[-1]).write_text("
FAKES = {
    "works": f"{WRITES}'{{\"ms\": 1.5}}'); print('fine')",
    "fails": f"{WRITES}'{{\"ms\": 1.5}}'); print('one'); raise SystemExit('two')",
    "tells_shared": f"import json, os; {WRITES}json.dumps({{'ms': 1.5, 'shared': os.environ.get('ZB_SHARED')}}))",
    "skips": f'{WRITES}\'{{"skip_reason": "not this GPU"}}\')',
    "forgets": "print('nothing written')",
    "babbles": f"{WRITES}'ms: 1.5')",
    "lacks": f"{WRITES}'{{\"us\": 1500.0}}')",
    "diverges": f'{WRITES}\'{{"ms": 1.5, "rows": [{{"norm": NaN}}]}}\')',
    "mistypes": f'{WRITES}\'{{"ms": "1.5"}}\')',
    # Ignores SIGTERM, and has a child in a session of its own, as a launcher of ranks has.
    "hangs": (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "code = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)'\n"
        "child = subprocess.Popen([sys.executable, '-c', code], start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    ),
    "crashes": (
        "import os, signal, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for results; its parent has the package ``fakes``, which Python can import."""
    (tmp_path / "fakes").mkdir()
    for name, text in FAKES.items():
        (tmp_path / f"fakes/{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(run, "_GRACE_S", 0.5)
    monkeypatch.setattr(run, "_PATIENCE_ON_CPU", 1)
    return tmp_path / "results"


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def step(name: str, limit_s: int = 60, on_cpu: str | None = "", num_gpus: int = 1) -> Step:
    return Step(name, name, "", limit_s, "{ms:.1f} ms", on_cpu, num_gpus=num_gpus)


def results(*steps: Step, folder: Path, on_cpu: bool = True) -> list[dict[str, Any]]:
    *_, last = run.run_part(Part("fakes", steps), folder, on_cpu, package="fakes")
    return last["steps"]


def statuses(*steps: Step, folder: Path, on_cpu: bool = True) -> list[str]:
    return [one["status"] for one in results(*steps, folder=folder, on_cpu=on_cpu)]


def test_every_kind_of_failure_is_named_and_stops_no_other_step(folder: Path) -> None:
    names = ("fails", "forgets", "babbles", "lacks", "diverges", "mistypes", "works")
    found = dict(zip(names, statuses(*map(step, names), folder=folder), strict=True))
    assert found.pop("works") == OK and found.pop("babbles").startswith("figures are not JSON")
    assert found.pop("mistypes").startswith("has a figure of another type")
    assert found == {
        "fails": "exit status 1",
        "forgets": "wrote no figures",
        "lacks": "lacks the figure 'ms'",
        "diverges": "not finite: rows.0.norm",
    }


def test_step_that_gives_a_reason_is_skipped(folder: Path) -> None:
    (skipped,) = results(step("skips"), folder=folder)
    assert skipped["status"] == f"{SKIPPED}not this GPU" and not run.is_failure(skipped)


def test_failed_step_keeps_its_figures_and_the_end_of_its_log(folder: Path) -> None:
    (failed,) = results(step("fails"), folder=folder)
    assert failed["figures"] == {"ms": 1.5} and failed["last_lines"] == ["one", "two"]


def test_hanging_step_is_ended_with_its_descendants(folder: Path) -> None:
    first, second = results(step("hangs", 5), step("works"), folder=folder)
    assert first["status"] == "timed out after 5 s" and second["status"] == OK
    (child,) = first["last_lines"]
    assert not is_alive(int(child))


def test_descendants_of_a_step_that_crashes_are_ended(folder: Path) -> None:
    (crashed,) = results(step("crashes"), folder=folder)
    assert crashed["status"] == "exit status -9"
    (child,) = crashed["last_lines"]
    assert not is_alive(int(child))


@pytest.mark.full
def test_part_ends_in_time_whatever_its_steps_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PART_LIMIT_S", 4)
    assert statuses(step("hangs", 60), step("hangs", 60), folder=folder) == [
        "timed out after 4 s",
        "timed out after 1 s",
    ]


def test_steps_that_need_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --cpu they are not counted; on a machine with too few GPUs they are failures."""
    assert statuses(step("fails", on_cpu=None), folder=folder) == [NEEDS_GPU]
    monkeypatch.setattr(run, "gpus", lambda: ["one"])
    two = statuses(step("fails", num_gpus=2), step("works"), folder=folder, on_cpu=False)
    assert two == ["needs 2 or more GPUs, or one and a packed NCCL; found 1", OK]


def test_step_whose_package_is_missing_does_not_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "gpus", lambda: ["one"])
    needing = replace(step("works"), needs="no_such_package")
    assert statuses(needing, step("works"), folder=folder, on_cpu=False) == [
        "needs no_such_package, which is neither installed nor packed",
        OK,
    ]


def test_ranks_that_share_a_gpu_compute_at_the_same_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the step has for a GPU share it, and none where every rank has its own."""
    asked: list[int] = []

    @contextmanager
    def served(ranks_per_gpu: int) -> Iterator[dict[str, str]]:
        asked.append(ranks_per_gpu)
        yield {"ZB_SHARED": str(ranks_per_gpu)}

    monkeypatch.setattr(run.mps, "shared_gpu", served)
    monkeypatch.setattr(shared_nccl, "variables", lambda: {"ZB_NCCL": "yes"})
    sharing = replace(step("tells_shared", num_gpus=4), shares_gpu=True)
    for gpus in (["one"], ["one"] * 4):
        monkeypatch.setattr(run, "gpus", lambda gpus=gpus: gpus)
        (found,) = results(sharing, folder=folder, on_cpu=False)
        assert found["figures"]["shared"] == str(asked[-1])
    assert asked == [4, 1]


def test_packed_nccl_lets_ranks_share_a_gpu(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libnccl.so.2"
    monkeypatch.setattr(shared_nccl, "LIBRARY", library)
    monkeypatch.setattr(run, "gpus", lambda: ["one"])
    assert shared_nccl.variables() == {}
    library.touch()
    assert shared_nccl.variables()["LD_PRELOAD"] == str(library)
    monkeypatch.setattr(shared_nccl, "variables", lambda: {"ZB_SHARED": "yes"})
    shared, alone = results(step("tells_shared", num_gpus=2), step("tells_shared"), folder=folder, on_cpu=False)
    assert (shared["status"], shared["figures"]["shared"], alone["figures"]["shared"]) == (OK, "yes", None)
    monkeypatch.setattr(run, "gpus", list)
    assert statuses(step("works", num_gpus=2), folder=folder, on_cpu=False)[0].startswith("needs 2 or more GPUs")


def test_exit_status_counts_failures_and_parts_are_added(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    part = Part("fakes", (step("fails"), step("works"), step("forgets"), step("works", on_cpu=None)))
    monkeypatch.setattr(run, "PARTS", {"bad": part, "good": Part("good", (step("works"),))})
    real = run.run_part
    monkeypatch.setattr(run, "run_part", lambda *arguments: real(*arguments, package="fakes"))
    for name, failures in (("bad", 2), ("good", 0)):
        monkeypatch.setattr(sys, "argv", ["gpu_day.sh", name, "--cpu", "--folder", str(folder)])
        assert run.main() == failures
    parts = json.loads((folder / run.RESULTS).read_text())
    assert list(parts) == ["bad", "good"] and len(parts["bad"]["steps"]) == 4 and parts["bad"]["on_cpu"]
    assert parts["bad"]["machine"]["torch"] and parts["bad"]["machine"]["commit"]
    rows = [re.split(r"  +", line) for line in capsys.readouterr().out.splitlines()]
    assert ["fails", "exit status 1", "0"] in rows and ["works", "ok", "0", "1.5 ms"] in rows, rows


def test_steps_are_chosen_by_their_names(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert [step.name for step in run.chosen(PARTS["lengths"], ["length"]).steps] == ["lengths"]
    assert run.chosen(PARTS["lengths"], None) == PARTS["lengths"]
    monkeypatch.setattr(sys, "argv", ["gpu_day.sh", "lengths", "--cpu", "--steps", "vocabulary"])
    with pytest.raises(SystemExit):
        run.main()
    assert "part lengths has no step whose name contains vocabulary; it has pairs, lengths" in capsys.readouterr().err


def test_results_of_a_part_that_is_ended_are_kept(folder: Path) -> None:
    """SIGTERM, as from a limit around the script: the steps before are in the file, the running one is ended."""
    main = (
        "import sys; from gpu_day import run; from tests.gpu_day.test_run import *; "
        "run.PARTS = {'1': Part('', (step('works'), step('hangs')))}; real = run.run_part; "
        "run.run_part = lambda *a: real(*a, package='fakes'); run._GRACE_S = 0.5; sys.exit(run.main())"
    )
    environment = ranks.environment()
    command = [sys.executable, "-c", main, "1", "--cpu", "--folder", str(folder)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    log = folder / "1/hangs.log"
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_text().endswith("\n")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    assert process.wait(60) != 0
    (kept,) = json.loads((folder / run.RESULTS).read_text())["1"]["steps"]
    assert kept["status"] == OK
    assert not is_alive(int(log.read_text()))


@pytest.mark.parametrize("name", PARTS)
def test_limits_of_the_steps_fit_into_the_part(name: str) -> None:
    steps = PARTS[name].steps
    assert sum(one.limit_s for one in steps) <= run.PART_LIMIT_S
    files = [one.name.replace(",", "").replace(" ", "-") for one in steps]
    assert len(set(files)) == len(files)


def test_environment_of_a_step_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZB_TEST_EAGER", "0")
    (eager,) = (one for one in PARTS["stock"].steps if "ZB_TEST_EAGER" in one.environment)
    assert run._variables(eager, False)["ZB_TEST_EAGER"] == "1"
