"""CUDA graphs, as a ``GraphPool``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron.zero_bubble.engine.platforms.graphs import Result


class CudaGraphPool:
    """A private pool of torch's allocator.

    Other threads may use the device during a capture, as NCCL's watchdog does.

    Args:
        generators: those of random numbers that the work draws, in addition to the default one of the device.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._handle = torch.cuda.graph_pool_handle()
        self._generators = generators

    def capture(self, work: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        # autograd accumulates the gradient of a weight on the stream that was current when it first used the weight,
        # which is that of the passes. The legacy default stream cannot be captured; torch then takes one of its own.
        stream = torch.cuda.current_stream()
        own = None if stream == torch.cuda.default_stream() else stream
        with torch.cuda.graph(graph, pool=self._handle, stream=own, capture_error_mode="thread_local"):
            result = work()
        return graph, result
