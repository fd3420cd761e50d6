"""Commands read each input file once, so that it can be a pipe: ``plan --costs <(...)``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.formats.costs import costs_to_json
from megatron.zero_bubble.core.formats.plan import plan_to_json
from megatron.zero_bubble.core.formats.trace import trace_to_json
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.core.schedules import build
from tests.core.formats.test_trace import recording
from tests.helpers.reads import log_reads

LINEAR = Placement.linear(2)
COSTS = PassCosts.uniform(LINEAR, 9.0, 7.0, 4.0, 0.5)
COSTS_FILE = costs_to_json(COSTS, PassMemory.uniform(LINEAR, 2.0**20))
SCHEDULE_FILE = plan_to_json(simulate(build("zb-h1", num_ranks=2, num_microbatches=4), COSTS))
TRACE_FILE = trace_to_json(recording())
SIZES = "--num-ranks 2 --num-microbatches 4"
TIMES = "--forward-ms 1 --backward-ms 1 --wgrad-ms 1"
LAYOUT = "--nodes 1 --gpus-per-node 2"
JOB = """-- --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --train-iters 1
    --lr 1e-3 --mock-data --global-batch-size 4 --pipeline-model-parallel-size 2"""


pytestmark = pytest.mark.skipif(not Path("/dev/fd").is_dir(), reason="requires /dev/fd")


def run(arguments: str, content: str) -> int:
    """Run a command with ``FILE`` replaced by a pipe that contains ``content``; return the exit code."""
    reader, writer = os.pipe()
    os.write(writer, content.encode())
    os.close(writer)
    try:
        return main(arguments.replace("FILE", f"/dev/fd/{reader}").split())
    finally:
        os.close(reader)


def test_dry_run_reads_the_schedule_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, log = tmp_path / "plan.json", tmp_path / "reads"
    file.write_text(SCHEDULE_FILE)
    monkeypatch.setattr(Path, "read_text", Path.read_text)  # log_reads replaces it; this restores it at the end
    log_reads(file, log, "read")
    code = main(f"dry-run {LAYOUT} {JOB} --zero-bubble-schedule-file {file}".split())
    assert code == 0, capsys.readouterr().err
    assert log.read_text() == "read\n"


@pytest.mark.parametrize(
    ("arguments", "content"),
    [
        (f"plan --schedule zb-h1 {SIZES} --costs FILE", COSTS_FILE),
        (f"plan --schedule zb-auto {SIZES} --costs FILE --memory-limit 1p", COSTS_FILE),
        (f"plan --schedule v-min {SIZES} --costs FILE --memory-limit 1GiB --step-ms 3", COSTS_FILE),
        pytest.param(f"compare {SIZES} --costs FILE", COSTS_FILE, marks=pytest.mark.full),
        (f"compare {SIZES} --costs FILE --equal-passes", COSTS_FILE),
        (f"dry-run {LAYOUT} --costs FILE {JOB} --zero-bubble-schedule zb-h1", COSTS_FILE),
        (f"plan --schedule-file FILE {TIMES} --memory-limit 1p", SCHEDULE_FILE),
        (f"advise --quick --gpus-per-node 2 --costs FILE {JOB} --num-layers 16 --mtp-num-layers 1", COSTS_FILE),
        ("trace FILE", TRACE_FILE),
    ],
)
def test_input_file_can_be_a_pipe(arguments: str, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, written = run(arguments, content), capsys.readouterr()
    assert code == 0, written.err
    assert "must be JSON" not in written.out, "a change that reads the pipe again is refused"
