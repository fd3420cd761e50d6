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
from collections.abc import Callable, Iterator

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS, SHARE = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_USE_CUDA = """
import ctypes
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
raise SystemExit(bool(cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)))
"""


@contextlib.contextmanager
def shared_gpu(ranks_per_gpu: int) -> Iterator[dict[str, str]]:
    """Run the service while ranks run that this process starts, if several use a GPU and the machine has the service.

    Gives the variables that the ranks need; none without a service that works.
    """
    if ranks_per_gpu > 1 and os.environ.get(PIPES):  # somebody else has started it, and ends it
        yield {SHARE: os.environ.get(SHARE) or str(100 // ranks_per_gpu)}
        return
    with tempfile.TemporaryDirectory(prefix="zero-bubble-mps-") as folder:
        variables = {PIPES: folder, LOGS: folder}
        is_used = ranks_per_gpu > 1 and _started(variables, can_use_cuda)
        try:
            yield {**variables, SHARE: str(100 // ranks_per_gpu)} if is_used else {}
        finally:
            if is_used:
                _quit(variables)


def is_used() -> bool:
    """Whether this process runs under the service."""
    return bool(os.environ.get(SHARE))


def _started(variables: dict[str, str], works: Callable[[dict[str, str]], bool]) -> bool:
    """Start the service; end it again if ``works`` with its variables does not."""
    if shutil.which(CONTROL) is None:
        return False
    environment, nothing = {**os.environ, **variables}, subprocess.DEVNULL  # the service would hold our output open
    code = subprocess.run([CONTROL, "-d"], env=environment, stdout=nothing, stderr=nothing, check=False).returncode
    if code == 0 and works(variables):
        return True
    _quit(variables)
    return False


def can_use_cuda(variables: dict[str, str]) -> bool:
    """Whether a process with these variables can use the GPU."""
    command = [sys.executable, "-c", _USE_CUDA]
    try:
        return subprocess.run(command, env={**os.environ, **variables}, timeout=60, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _quit(variables: dict[str, str]) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        environment = {**os.environ, **variables}
        subprocess.run([CONTROL], input="quit\n", text=True, env=environment, timeout=10, check=False)
