"""CUDA's Multi-Process Service (MPS), under which ranks that share a GPU compute at the same time, each on its part.

The service is a program of the driver that runs while the ranks do; it changes no setting of the GPU.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS, SHARE = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
PATIENCE_S = 90.0


@contextlib.contextmanager
def shared_gpu(ranks_per_gpu: int) -> Iterator[bool]:
    """Run this rank under the service, if several ranks use a GPU and the machine has a service that works.

    All ranks of this machine enter before they use CUDA; the first starts the service. Gives whether it is in use.
    """
    if ranks_per_gpu < 2:
        yield False
        return
    share = str(100 // ranks_per_gpu)
    if os.environ.get(PIPES):  # somebody else has started the service, and ends it
        os.environ[SHARE] = os.environ.get(SHARE) or share
        yield True
        return
    folder = Path(tempfile.gettempdir()) / f"zero-bubble-mps-{os.environ['TORCHELASTIC_RUN_ID']}"
    is_first, verdict = os.environ["LOCAL_RANK"] == "0", folder / "verdict"
    if is_first:
        folder.mkdir()
        words = "yes" if started(folder, can_use_cuda) else "no"
        (folder / "new").write_text(words)
        (folder / "new").rename(verdict)
    deadline_s = time.monotonic() + PATIENCE_S
    while not verdict.exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    is_used = verdict.exists() and verdict.read_text() == "yes"
    if is_used:
        os.environ |= {**_variables(folder), SHARE: share}
    try:
        yield is_used
    finally:
        if is_used and is_first:
            _quit()


@contextlib.contextmanager
def of_ranks(ranks_per_gpu: int) -> Iterator[dict[str, str]]:
    """Run the service while this process starts ranks. Gives the variables that they need; none without a service."""
    if ranks_per_gpu > 1 and os.environ.get(PIPES):  # somebody else has started it, and ends it
        yield {SHARE: os.environ.get(SHARE) or str(100 // ranks_per_gpu)}
        return
    with tempfile.TemporaryDirectory(prefix="zero-bubble-mps-") as folder:
        is_used = ranks_per_gpu > 1 and started(Path(folder), can_use_cuda)
        variables = {**_variables(Path(folder)), SHARE: str(100 // ranks_per_gpu)} if is_used else {}
        try:
            yield variables
        finally:
            if is_used:
                _quit(variables)


def started(folder: Path, works: Callable[[dict[str, str]], bool]) -> bool:
    """Start the service; end it again if ``works`` with its variables does not."""
    if shutil.which(CONTROL) is None:
        return False
    variables = _variables(folder)
    code = subprocess.run([CONTROL, "-d"], env={**os.environ, **variables}, check=False).returncode
    if code == 0 and works(variables):
        return True
    _quit(variables)
    return False


def can_use_cuda(variables: dict[str, str]) -> bool:
    """Whether a process with these variables can use the GPU."""
    command = [sys.executable, "-c", "import torch; torch.ones(1, device='cuda').sum().item()"]
    try:
        return subprocess.run(command, env={**os.environ, **variables}, timeout=60, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _variables(folder: Path) -> dict[str, str]:
    return {PIPES: str(folder), LOGS: str(folder)}


def _quit(variables: dict[str, str] | None = None) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        environment = {**os.environ, **(variables or {})}
        subprocess.run([CONTROL], input="quit\n", text=True, env=environment, timeout=10, check=False)
