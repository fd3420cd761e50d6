"""Planning on a machine without torch, numpy and psutil, for a job that runs on another one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

JOB = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
    "--micro-batch-size 1 --global-batch-size 8 --pipeline-model-parallel-size 4 --train-iters 10 --lr 1e-4 "
    "--vocab-size 32000 --tokenizer-type NullTokenizer --mock-data --bf16 --save {folder}"
)
BARE = "import sys; sys.modules.update(dict.fromkeys(('torch', 'numpy', 'psutil', 'transformer_engine')))"


def run_bare(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    code = f"{BARE}\nfrom megatron.zero_bubble.__main__ import main\nsys.exit(main(sys.argv[1:]))"
    job = JOB.format(folder=folder)
    return subprocess.run(
        [sys.executable, "-c", code, *f"{command} {job}".split()], capture_output=True, text=True, check=False
    )


def test_advice_does_not_depend_on_what_is_installed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from megatron.zero_bubble.__main__ import main

    command = "advise --quick --gpus-per-node 4 --format json --"
    bare = run_bare(command, tmp_path)
    assert bare.returncode == 0, bare.stderr
    found: dict[str, Any] = json.loads(bare.stdout)
    assert len(found["advice"]) > 1 and "psutil" not in bare.stdout
    assert main(f"{command} {JOB.format(folder=tmp_path)}".split()) == 0
    assert json.loads(capsys.readouterr().out) == found


@pytest.mark.parametrize("ours", [True, False])
def test_a_dry_run_says_what_the_job_also_needs(tmp_path: Path, ours: bool) -> None:
    command = f"dry-run --gpus-per-node 4 {'' if ours else '--megatron-lm '}--"
    bare = run_bare(command, tmp_path)
    assert bare.returncode == 0, bare.stderr
    assert "The job also needs psutil, which is not installed here." in bare.stdout.splitlines()


def test_the_list_of_schedules_takes_no_planner() -> None:
    """Importing the planner takes longer than printing the list."""
    script = "from megatron.zero_bubble.__main__ import main; main(['list']); import sys; print('\\n', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    modules = done.stdout.split("\n")[-2].split()
    assert "megatron.zero_bubble.core.schedules" in modules
    assert [name for name in modules if name.startswith(("megatron.zero_bubble.planning", "torch"))] == []
