"""The bench of advice: ranks whose products take the time of their operations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench import ranks

SCRIPT = """
import os, time, torch

x = torch.full((100, 100), 2.0, requires_grad=True)
times = [time.perf_counter()]
product = torch.mm(x, x)
times.append(time.perf_counter())
product.sum().backward()
times.append(time.perf_counter())
torch.mm(x.detach(), x.detach(), out=torch.empty(100, 100))
torch.bmm(x.detach()[None], x.detach()[None])
times.append(time.perf_counter())
forward, backward, others = (1e3 * (after - before) for before, after in zip(times, times[1:]))
print(os.environ["RANK"], product[0, 0].item(), x.grad[0, 0].item(), int(forward), int(backward), int(others))
"""
RUN = """
import sys
from pathlib import Path
from bench.emulated_device import run
print(run(Path(sys.argv[1]), [], 2, gflops=0.02))
"""


def emulated(script: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN, str(script)]
    return subprocess.run(command, env=ranks.environment(), capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.full
def test_products_take_the_time_of_their_operations(tmp_path: Path) -> None:
    """Two million operations take 100 ms, and twice that backward; the results are those of the processor."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = emulated(script)
    assert done.returncode == 0, done.stderr
    lines = sorted(line.split() for line in done.stdout.splitlines() if line)
    assert [line[:3] for line in lines] == [["0", "400.0", "400.0"], ["1", "400.0", "400.0"]]
    for *_, forward, backward, others in lines:
        assert int(forward) >= 100 and int(backward) >= 200 and int(others) >= 200


def test_a_rank_that_fails_is_reported(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    waiting = "import os, time\nif os.environ['RANK'] == '1': raise SystemExit(3)\ntime.sleep(1000)"
    script.write_text(waiting, encoding="utf-8")
    done = emulated(script)
    assert done.returncode and "ranks ended with [-15, 3]" in done.stderr


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_job_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    words = "--jobs even --num-ranks 2 --rounds 1 --gflops 2 --output".split()
    command = [sys.executable, "-m", "bench.auto_wall", *words, str(file)]
    done = subprocess.run(command, env=ranks.environment(), capture_output=True, text=True, timeout=1100, check=False)
    assert done.returncode == 0 and file.exists(), done.stdout + done.stderr
