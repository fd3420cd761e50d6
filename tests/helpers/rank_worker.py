"""The worker loop of the rank pool (``ranks.py``): receive a job, run it, reply, and reset the process."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import os
import pickle
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path

SEED = 1234


@dataclass(frozen=True)
class Group:
    """The default process group of a run: over gloo, or over NCCL.

    ``eager`` binds NCCL's group to the rank's GPU, so that torch creates communicators before they are used.
    """

    backend: str = "gloo"
    eager: bool = False


@dataclass(frozen=True)
class Job:
    """One call for one rank; ``call`` is the pickled ``(fn, args, after)``. The pool sends None to request a reset."""

    rank: int
    world_size: int
    store: str
    timeout_s: float
    call: bytes
    group: Group


@dataclass(frozen=True)
class Reply:
    """The pickled result, or the traceback of the exception."""

    result: bytes = b""
    error: str = ""


def serve(connection: Connection, log: str, initializer: Callable[[], object]) -> None:
    """Run jobs until the pool closes its end of the connection. Output goes to the file ``log``."""
    _own_process(log)
    connection.send_bytes(pickle.dumps(_reply(initializer, keep=False)))
    while True:
        try:
            job: Job | None = pickle.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)
        if job is None:
            reply = _reply(reset, keep=False)
        else:
            os.ftruncate(1, 0)
            reply = _reply(functools.partial(_run, job), keep=True)
        connection.send_bytes(pickle.dumps(reply))


def reset() -> None:
    """Clear the last job's process groups, megatron-core's globals and garbage. A job must revert its own patches."""
    import torch.distributed
    from megatron.core import num_microbatches_calculator, parallel_state, rerun_state_machine
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, get_moe_layer_wise_logging_tracker
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    patching = sys.modules.get("megatron.zero_bubble.integration.patching")
    left = patching.report() if patching else []
    assert not left, f"the job left patches behind; call patching.revert() at its end: {left}"
    parallel_state.destroy_model_parallel()
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    rerun_state_machine.destroy_rerun_state_machine()
    initialize_rng_tracker(force_reset=True)
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    get_moe_layer_wise_logging_tracker().clear()  # its length is that of the first model
    MTPLossLoggingHelper.tracker.clear()
    with contextlib.suppress(ImportError):  # since 0.18, the losses of experts are in a tracker of their own
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

        destroy_moe_metrics_tracker()
    gc.collect()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def sleep(_rank: int) -> None:
    """A job without an end, for tests of what ends it."""
    time.sleep(60)


def _run(job: Job) -> object:
    import numpy
    import torch
    import torch.distributed

    device = None
    if job.group.backend == "nccl":
        device = torch.device("cuda", job.rank % torch.cuda.device_count())  # NCCL may let ranks share a GPU
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        job.group.backend,
        store=torch.distributed.FileStore(job.store, job.world_size),
        rank=job.rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.timeout_s),
        device_id=device if job.group.eager else None,
    )
    os.environ.update(RANK=str(job.rank), LOCAL_RANK=str(job.rank), WORLD_SIZE=str(job.world_size))
    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)
    fn, args, after = pickle.loads(job.call)
    result = fn(job.rank, *args)
    if after is not None:
        after(job.rank)
    return result


def _reply(call: Callable[[], object], keep: bool) -> Reply:
    """Call and pack the result or the exception; without ``keep`` the result is dropped."""
    try:
        result = call()
        return Reply(result=pickle.dumps(result if keep else None))
    except BaseException:  # noqa: BLE001 (SystemExit and pytest's outcomes too: the pool must learn what ended the job)
        return Reply(error=traceback.format_exc())


def _own_process(log: str) -> None:
    """Start a new session that ends with the pool; write to ``log``, dump the stack on SIGUSR2, use one thread."""
    import torch

    os.setsid()  # Ctrl-C reaches only the parent, and one signal reaches a job's children (checkpoint writers)
    threading.Thread(target=_die_with_parent, args=(Path(log).parent,), daemon=True).start()
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    torch.set_num_threads(1)
    _share_device()


def _share_device() -> None:
    """Give all gloo groups of this process one device.

    By default each group has a device of its own, whose thread wakes 100 times per second. Models that are never freed
    keep their groups (``ranks.MAX_THREADS``), and thousands of idle threads take a fifth of the machine.
    """
    from torch.distributed import Store
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    create = ProcessGroupGloo.__init__
    device = ProcessGroupGloo.create_default_device()

    def init(self: ProcessGroupGloo, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._threads, options._timeout = [device], 2, timeout
        create(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = init  # type: ignore[method-assign]


def _die_with_parent(folder: Path) -> None:
    """End the rank when the test process dies: the fork server lives as long as its ranks, so it does not end them.

    Also remove the pool's folder, since the killed test process cannot.
    """
    parent = parent_process()
    assert parent is not None, "a rank is started by the pool"
    wait([parent.sentinel])
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
