"""Loops on the megatron-core of a checkout, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.helpers.megatron_lm import ROOT, Checkout


def check_on(
    checkout: Checkout, rows: Mapping[str, tuple[str, Mapping[str, Any]]], folder: Path, num_ranks: int = 2
) -> None:
    """Check that rows, each a loop and the options of its models, equal stock under every schedule."""
    path = os.pathsep.join(map(str, (checkout.path, ROOT, ROOT / "tests/helpers/other_versions")))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    described = json.dumps({name: (loop, dict(options)) for name, (loop, options) in rows.items()})
    running = []
    for rank in range(num_ranks):
        arguments = [str(rank), str(num_ranks), str(folder / "store"), described]
        command = [sys.executable, "-W", "ignore", "-m", "tests.loops.run", *arguments]
        own = {**environment, "RANK": str(rank), "WORLD_SIZE": str(num_ranks), "TORCHDYNAMO_DISABLE": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        running.append(subprocess.Popen(command, env=own, cwd=ROOT, **pipes))  # type: ignore[call-overload]
    try:
        texts = [process.communicate(timeout=500)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    lines = [line for line in texts[0].splitlines() if line.startswith((*rows, "compared "))]
    assert [process.returncode for process in running] == [0] * num_ranks, texts
    assert [line.rpartition(" on ")[0] for line in lines] == [f"compared {name}" for name in rows], lines
