"""Without our flags the launcher does not change a job; with a patched checkout no launcher is needed."""

from __future__ import annotations

import difflib
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.megatron_lm import BASE_FLAGS, ROOT, VARIABLE, Checkout, Job, checkouts, pretrain_gpt

CHECKOUTS = checkouts()
FLAGS = (*BASE_FLAGS.split(), *"--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights".split())
pytestmark = [
    pytest.mark.skipif(not CHECKOUTS, reason=f"{VARIABLE} names no checkout of Megatron-LM"),
    pytest.mark.timeout(1200),
]
# Differences between two runs of one job: dates, times and addresses. The order of the ranks' lines differs as well.
_VARIES = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d+)?|\(\d+\.\d+, \d+\.\d+\)|0x[0-9a-f]+"
    r"|\d+\.\d+ (?=\||seconds|s\b)|[:=] *\d+\.\d+(?= ?(s|ms|$))"
)


def _lines(text: str) -> list[str]:
    """Return the sorted lines without durations; keep all arguments, which Megatron prints with dots."""
    lines = (line for line in text.splitlines() if "....." in line or not ("time" in line or "elapsed" in line))
    return sorted(_VARIES.sub("#", line) for line in lines)


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
def test_log_without_our_flags_differs_from_stock_by_one_line(checkout: Checkout) -> None:
    job = Job(checkout.path / "pretrain_gpt.py", 2, FLAGS)
    ours = job.run()
    plain = replace(job, before=(str(ROOT / "tests/helpers/on_cpu.py"),)).run()
    assert ours.exit_codes == plain.exit_codes == (0, 0), ours.text[-4000:]
    own = ours.of("zero-bubble: ")
    assert own == ["zero-bubble: no --zero-bubble-schedule; the script runs unchanged, on CPU ranks"]
    assert ours.figures == plain.figures
    without = [line for line in _lines(ours.text) if line not in own]
    assert list(difflib.unified_diff(without, _lines(plain.text), n=0, lineterm="")) == []


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
def test_patched_checkout_trains_without_the_launcher(checkout: Checkout, tmp_path: Path) -> None:
    patch = ROOT / "patches" / ("main.diff" if checkout.minor == "0.20" else f"core_r{checkout.minor}.0.diff")
    patched = tmp_path / "Megatron-LM"
    patched.mkdir()
    for path in (*checkout.path.glob("*.py"), checkout.path / "megatron"):
        (patched / path.name).symlink_to(path)
    script = patched / "pretrain_gpt.py"
    script.unlink()
    shutil.copy(checkout.path / "pretrain_gpt.py", script)
    subprocess.run(["git", "init", "-q"], cwd=patched, check=True)
    subprocess.run(["git", "apply", str(patch)], cwd=patched, check=True)
    flags = (*FLAGS, "--zero-bubble-device", "cpu", "--zero-bubble-schedule", "zb-h1", "--zero-bubble-exact")
    log = Job(script, 2, flags, before=()).run()
    assert log.exit_codes == (0, 0), log.text[-4000:]
    assert len(log.of("zero-bubble: schedule zb-h1 in ")) == 1
    launched = pretrain_gpt(checkout, 2, " ".join(FLAGS[-3:]), "zb-h1")
    assert log.figures == launched.figures
    assert len(log.figures) >= 10
