"""Run a training script whose passes take a fixed time, on ranks of a CPU; print the time from iteration to iteration.

The F, B and W passes of every stage sleep until their time has passed, so that ranks that share a core behave as if
each had a device. Used by ``post_validation jobs``, on every rank:

    python -m bench.paced PASS_MS NUM_MICROBATCHES own|launcher SCRIPT [its arguments]
"""

from __future__ import annotations

import runpy
import sys
import time
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.zero_bubble.engine.kernels.implementation import select

_SETTLED = 3
"""Iterations before the period is constant."""


class Pace:
    """Hooks on the stage of this rank.

    Args:
        pass_ms: time of an F, a B and a W pass.
        num_microbatches: of an iteration.
    """

    def __init__(self, pass_ms: float, num_microbatches: int) -> None:
        self._seconds, self._num_microbatches = pass_ms / 1e3, num_microbatches
        self._begun = 0.0
        self._starts: list[float] = []
        self._num_forwards = 0
        nn.modules.module.register_module_forward_pre_hook(self._before)
        nn.modules.module.register_module_forward_hook(self._after)

    def _before(self, module: nn.Module, inputs: Any) -> None:
        kind = type(module).__name__
        if kind == "GPTModel":
            self._begin()
            if self._num_forwards % self._num_microbatches == 0:
                self._starts.append(self._begun)
            self._num_forwards += 1
        elif kind == "TransformerBlock":
            # The gradient of what enters the layers is the last one of a backward.
            entering = inputs[0] if inputs and inputs[0] is not None else module.input_tensor
            if isinstance(entering, Tensor) and entering.requires_grad:
                entering.register_hook(self._end)

    def _after(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        if type(module).__name__ == "GPTModel":
            assert isinstance(output, Tensor)
            if output.requires_grad:
                output.register_hook(self._begin)
            self._end()

    def _begin(self, _gradient: Tensor | None = None) -> None:
        self._begun = time.perf_counter()

    def _end(self, _gradient: Tensor | None = None) -> None:
        time.sleep(max(0.0, self._begun + self._seconds - time.perf_counter()))

    def period_ms(self) -> float:
        """Median time from the first forward of an iteration to that of the next one."""
        settled = self._starts[_SETTLED:]
        return 1e3 * median(after - before for before, after in pairwise(settled))


class PacedWeightGradients(TorchDispatchMode):
    """Makes W passes take their time; each calls the op that accumulates all its weight gradients once."""

    def __init__(self, pass_ms: float) -> None:
        super().__init__()
        self._seconds = pass_ms / 1e3

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.zero_bubble.wgrad_accumulate_many.default:
            return func(*args, **kwargs or {})
        begun = time.perf_counter()
        func(*args, **kwargs or {})
        time.sleep(max(0.0, begun + self._seconds - time.perf_counter()))
        return None


def main() -> None:
    """Run the script to its end, then print the period of this rank."""
    pass_ms, num_microbatches, how, *arguments = sys.argv[1:]
    pace = Pace(float(pass_ms), int(num_microbatches))
    if "compiled" not in select("cpu").words:
        raise SystemExit("this bench paces the compiled op of the weight gradients: build it, see docs/installation.md")
    try:
        with PacedWeightGradients(float(pass_ms)):
            if how == "launcher":
                from megatron.zero_bubble.integration.megatron_lm import launch

                launch.main(arguments)
            else:
                sys.argv = arguments
                runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    print(f"\npaced: {pace.period_ms():.3f}", flush=True)


if __name__ == "__main__":
    main()
