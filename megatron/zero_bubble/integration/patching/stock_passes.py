"""The passes of megatron-core's own 1F1B, for observers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state

from megatron.zero_bubble.core.ir import Compute, Kind, Pass
from megatron.zero_bubble.engine.runtime.observer import IterationStart, Observers, observed


class StockPasses:
    """Number the passes of the stock 1F1B, which runs F and BW each in the order of the microbatches.

    megatron-core's other schedules call the same two functions in other orders; their passes are not observed.
    """

    def __init__(self, observers: Observers) -> None:
        self._observers = observers
        self._next: dict[Kind, int] | None = None

    def run(self, original: Callable[..., Any], **kwargs: Any) -> Any:
        if kwargs.get("forward_only"):
            return original(**kwargs)
        self._next = {Kind.F: 0, Kind.BW: 0}
        group = parallel_state.get_pipeline_model_parallel_group()
        try:
            with observed(self._observers, IterationStart(group, kwargs["num_microbatches"])):
                return original(**kwargs)
        finally:
            self._next = None

    def step(self, kind: Kind, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._next is None:
            return original(*args, **kwargs)
        rank = parallel_state.get_pipeline_model_parallel_rank()
        op = Compute(Pass(rank, kind, self._next[kind]))
        self._next[kind] += 1
        self._observers.begin(op)
        result = original(*args, **kwargs)
        self._observers.end(op)
        return result
