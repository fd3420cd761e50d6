"""Training scripts on CPU ranks that each seem to have a device of a given speed.

Every matrix product, forward or backward, sleeps until the time has passed that its floating-point operations take at
this speed. So ranks that share a core hardly slow each other, as long as their own arithmetic is much faster, and runs
are comparable on a machine that others use too. What is not a product takes the time that it takes.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import time
import warnings
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore
from torch.library import Library
from torch.utils.flop_counter import flop_registry

from megatron.zero_bubble.engine.kernels import reference
from megatron.zero_bubble.engine.kernels.implementation import select

_aten = torch.ops.aten
_PRODUCTS = {
    "mm": _aten.addmm.out,
    "mm.out": _aten.addmm.out,
    "addmm": _aten.addmm.out,
    "addmm_": _aten.addmm.out,
    "bmm": _aten.baddbmm.out,
    "bmm.out": _aten.baddbmm.out,
    "baddbmm": _aten.baddbmm.out,
}
"""The products that models consist of, and what computes them, which is not replaced itself."""


class EmulatedDevice:
    """Replaces the matrix products of the CPU, until the process ends, by those of a slower device.

    Args:
        gflops: its operations in 1e9 per second; an addition and a multiplication are two.
    """

    def __init__(self, gflops: float) -> None:
        self._per_second = gflops * 1e9
        self._products = Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that an op is replaced
            for name in _PRODUCTS:
                self._products.impl(name, self._slow(name), "CPU")
            if "compiled" in select("cpu").words:  # of which no product would be seen
                self._ours = Library("zero_bubble", "IMPL")
                for op in (reference.wgrad_accumulate, reference.wgrad_accumulate_many):
                    self._ours.impl(op.__name__, op, "CPU")

    def _slow(self, name: str) -> Any:
        compute = _PRODUCTS[name]
        flops = flop_registry[getattr(_aten, name.partition(".")[0].rstrip("_"))]

        def product(*args: Any, out: Tensor | None = None, **kwargs: Any) -> Tensor:
            begun = time.perf_counter()
            *added, x, y = args
            if out is None:
                out = args[0] if name == "addmm_" else x.new_empty((*x.shape[:-1], y.shape[-1]))
            if added:
                compute(*args, **kwargs, out=out)
            else:
                compute(x.new_zeros((1,) * x.dim()), x, y, beta=0, out=out)
            seconds = flops(*args, **kwargs, out_val=out) / self._per_second
            time.sleep(max(0.0, begun + seconds - time.perf_counter()))
            return out

        return product


def run(script: Path, argv: Sequence[str], num_ranks: int, gflops: float) -> str:
    """Run a training script on emulated devices, and return what its ranks print.

    The ranks are forks of this process, so that what it has imported need not be imported again. If one fails, the
    others are ended.

    Raises:
        RuntimeError: a rank fails; with what the ranks have printed.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    world = address | {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    fork = multiprocessing.get_context("fork")
    with TemporaryFile("w+") as output:
        children = []
        for rank in map(str, range(num_ranks)):
            environment = world | {"RANK": rank, "LOCAL_RANK": rank}
            child = fork.Process(target=_as_rank, args=(script, argv, environment, gflops, output.fileno()))
            child.start()
            children.append(child)
        while running := [child for child in children if child.is_alive()]:
            if any(child.exitcode for child in children):
                for child in running:
                    child.terminate()
            wait([child.sentinel for child in running])
        output.seek(0)
        text = output.read()
    if any(child.exitcode for child in children):
        raise RuntimeError(f"ranks ended with {[child.exitcode for child in children]}:\n{text}")
    return text


def _as_rank(script: Path, argv: Sequence[str], environment: dict[str, str], gflops: float, output: int) -> None:
    """Run the script to its end in this process."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= environment
    sys.argv = [str(script), *argv]
    device = EmulatedDevice(gflops)
    runpy.run_path(str(script), run_name="__main__")
    del device
