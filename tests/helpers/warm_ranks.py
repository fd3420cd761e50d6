"""Ranks of Megatron-LM jobs, forked from a process that has done the imports, which take most of a small job's time.

A forked rank then does the same as ``python -m megatron.zero_bubble.launch SCRIPT ARGUMENTS``, in the same order.
"""

from __future__ import annotations

import atexit
import functools
import gc
import hashlib
import inspect
import json
import os
import runpy
import signal
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO


class WarmRanks:
    """A process that forks ranks for jobs that run ``script``; it ends with this process, and its ranks end with it.

    Args:
        environment: common environment of the ranks, without RANK and the like.
    """

    def __init__(self, script: Path, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd="/",
            text=True,
        )

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> ForkedRank:
        """Fork a rank that runs ``arguments``, whose first is the script; its output goes to the file ``output``."""
        return ForkedRank(self, self.ask(arguments=arguments, environment=dict(environment), output=str(output)))

    def ask(self, **request: Any) -> Any:
        """Send one request to the process and return its answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that forks ranks ended with {self._process.wait()}")
        return json.loads(answer)


class ForkedRank:
    """One rank, with the interface of ``subprocess.Popen``."""

    def __init__(self, ranks: WarmRanks, pid: int) -> None:
        self._ranks, self._pid = ranks, pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self._ranks.ask(pid=self._pid, block=False)
        return self._code

    def wait(self) -> int | None:
        if self._code is None:
            self._code = self._ranks.ask(pid=self._pid, block=True)
        return self._code

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self._pid, number)


class _FakeWandb(ModuleType):
    """Weights & Biases' module, as far as Megatron-LM uses it: writes one line of JSON per call of ``log``."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.config: dict[str, Any] = {}
        self._lines: list[str] = []

    def init(self, **options: Any) -> None:
        self._file = Path(options["dir"], "logged.jsonl")

    def log(self, figures: dict[str, Any], step: int) -> None:
        self._lines.append(json.dumps([step, {name: float(value) for name, value in figures.items()}]))

    def finish(self) -> None:
        self._file.write_text("\n".join(self._lines))


def _serve(script: str, answers: TextIO) -> list[str]:
    """Answer requests until stdin closes; returns only in a forked rank, with its arguments."""
    from megatron.zero_bubble.engine.platforms import cpu, select
    from megatron.zero_bubble.engine.platforms.cpu.megatron_lm import JOB_POINTS

    cpu.install(JOB_POINTS)
    select("cpu").setup(0)
    sys.modules["wandb"] = _FakeWandb("wandb")
    runpy.run_path(script, run_name="imported")
    _read_descriptions_of_flags_once()
    _digest_weights_after_training()
    _spoil_gradients()
    gc.freeze()
    running: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "pid" not in request:
            pid = os.fork()
            if pid == 0:
                return _become_rank(**request)
            running.add(pid)
            print(pid, file=answers, flush=True)
            continue
        pid, status = os.waitpid(request["pid"], 0 if request["block"] else os.WNOHANG)
        running.discard(pid)
        print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), file=answers, flush=True)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    sys.exit()


def _read_descriptions_of_flags_once() -> None:
    """Cache the sources from which Megatron-LM, since core_r0.16, reads many flags' descriptions at every start.

    Reading them takes a fifth of a small job's time. Nothing else in the jobs uses ``inspect.getsource``.
    """
    from megatron.training.arguments import add_megatron_arguments

    inspect.getsource = functools.cache(inspect.getsource)  # type: ignore[assignment]
    add_megatron_arguments(ArgumentParser())


def _digest_weights_after_training() -> None:
    """Print one digest per parameter and optimizer state when Megatron's training loop ends: printed losses have only
    seven digits.
    """
    from megatron.training import training

    train, whole = training.train, _read_whole_weights()

    @functools.wraps(train)
    def train_and_digest(forward_step_func: Any, model: Any, optimizer: Any, *rest: Any, **more: Any) -> Any:
        try:
            result = train(forward_step_func, model, optimizer, *rest, **more)
        except SystemExit:
            with whole(model):
                _print_digests(model, optimizer)
            raise
        with whole(model):
            _print_digests(model, optimizer)
        return result

    training.train = train_and_digest


def _spoil_gradients() -> None:
    """Change gradients as the variable ``SPOILED_GRADIENTS`` says, after their reduction and before the optimizer step.

    It lists faults ITERATION:PIPELINE_RANK:FACTOR with commas; a factor of nan or inf is written to one gradient.
    """
    from megatron.training import global_vars, training

    finalize = training.finalize_model_grads

    @functools.wraps(finalize)
    def finalize_and_spoil(model: Any, *rest: Any, **more: Any) -> Any:
        from megatron.core import parallel_state

        result = finalize(model, *rest, **more)
        own = parallel_state.get_pipeline_model_parallel_rank()
        for fault in filter(None, os.environ.get("SPOILED_GRADIENTS", "").split(",")):
            iteration, rank, factor = fault.split(":")
            if (int(iteration), int(rank)) != (global_vars.get_args().curr_iteration + 1, own):
                continue
            for buffer in (buffer for chunk in model for buffer in chunk.buffers):
                if factor in ("nan", "inf"):
                    buffer.grad_data[0] = float(factor)
                else:
                    buffer.grad_data.mul_(float(factor))
        return result

    training.finalize_model_grads = finalize_and_spoil


def _read_whole_weights() -> Callable[[Sequence[Any]], AbstractContextManager[None]]:
    """Return a context in which weights are whole; it prints how many bytes were, if they are shards."""
    from megatron.zero_bubble.integration.adapter.shards import ShardedUnits

    step_shards, found = ShardedUnits.step_shards, []

    def remember(units: Any, optimizer: Any) -> None:
        found.append(units)
        step_shards(units, optimizer)

    ShardedUnits.step_shards = remember  # type: ignore[assignment,method-assign]

    @contextmanager
    def whole(chunks: Sequence[Any]) -> Iterator[None]:
        if not found or not found[0].are_shards:
            yield
            return
        buffers = [(chunk.buffers[0].param_data, chunk.buffers[0].grad_data) for chunk in chunks]
        kept = sum(tensor.untyped_storage().nbytes() for pair in buffers for tensor in pair)
        sizes = [(weights.nbytes, gradients.nbytes) for weights, gradients in buffers]
        whole = {"rank": int(os.environ["RANK"]), "sizes": sizes, "whole": found[0].sharder.most_whole, "kept": kept}
        print(f"sharded units: {json.dumps(whole)}", flush=True)
        with found[0].whole_weights():
            yield

    return whole


def _print_digests(chunks: Sequence[Any], optimizer: Any) -> None:
    import torch
    from megatron.core.utils import get_attr_wrapped_model

    for chunk in chunks:
        model = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
        stack = "decoder" if hasattr(model, "decoder") else "encoder"
        numbers = [layer.layer_number for layer in getattr(model, stack).layers]
        for name, parameter in model.named_parameters():
            parts = name.split(".")
            if parts[:2] == [stack, "layers"]:
                parts[2] = f"number-{numbers[int(parts[2])]}"
            print(f"weights after training: {'.'.join(parts)} {_digest(parameter)}", flush=True)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.is_stub_optimizer:
            continue
        parameters = [parameter for group in part.optimizer.param_groups for parameter in group["params"]]
        for parameter in parameters:  # without their place, which depends on the placement of the stages
            state = part.optimizer.state[parameter]
            digests = [_digest(torch.as_tensor(value)) for _, value in sorted(state.items())]
            print(f"weights after training: optimizer's {_digest(parameter)} {' '.join(digests)}", flush=True)


def _digest(tensor: Any) -> str:
    import torch

    bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(bits).hexdigest()[:16]


def _become_rank(arguments: list[str], environment: dict[str, str], output: str) -> list[str]:
    os.environ.update(environment)
    for name, descriptors in ((os.devnull, (0,)), (output, (1, 2))):
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        for descriptor in descriptors:
            os.dup2(file, descriptor)
        os.close(file)
    atexit.register(_flush_tensorboard)
    if os.environ["NORM_AS_TENSOR"]:
        _scale_by_a_tensor()
    return arguments


def _flush_tensorboard() -> None:
    """Write the scalars of the last evaluation, which are lost now and then when a thread of TensorBoard ends first."""
    from megatron.training import global_vars

    if global_vars._GLOBAL_TENSORBOARD_WRITER is not None:
        global_vars._GLOBAL_TENSORBOARD_WRITER.flush()


def _scale_by_a_tensor() -> None:
    """Stand in for TransformerEngine's kernel, in whose presence megatron-core keeps the norm of gradients a tensor."""
    from megatron.core.optimizer import clip_grads

    clip_grads.multi_tensor_scale_tensor_impl = clip_grads.multi_tensor_scale_impl


if __name__ == "__main__":
    sys.path[0] = str(Path(sys.argv[1]).parent)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the imports may print
    from megatron.zero_bubble.integration.megatron_lm import launch

    sys.exit(launch.main(_serve(sys.argv[1], answers)))
