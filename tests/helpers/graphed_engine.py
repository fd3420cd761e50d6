"""A fake of TransformerEngine's ``make_graphed_callables`` on the CPU, which obeys TransformerEngine's rules.

- All graphs of a call share one pool: what is free while a graph is captured, its replays overwrite.
- The order lists a chunk for a forward, its negative for the backward of its oldest microbatch without one, and half
  less for a W. A W entry fills the graph of the *last* backward of its chunk, with the *first* entry of the queues.
- With shared buffers, all backwards of one shape read their output gradient from one tensor, and the outputs and input
  gradients of a layer are free for later captures when its backward, and that of the layer below, are captured.
- Each call warms its layers up, which adds to gradients, and then lets the next microbatch count as the first one.
- Hooks of data parallelism run behind a replayed W since 2.13, not before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.helpers.engine import TransformerEngineBaseModule
from tests.helpers.graphs import StandInGraph, StandInPool, _Argument, _Recorder


def version() -> tuple[int, ...]:
    return tuple(map(int, sys.modules["transformer_engine"].__version__.split("+")[0].split(".")[:2]))


class _Pool(StandInPool):
    """What a capture makes keeps its values, because a backward that is captured reads indices of its forward."""

    def capture(self, work: Callable[[], Any]) -> tuple[StandInGraph, Any]:
        before, random = self._free(), torch.get_rng_state()
        with _Recorder(self) as recorder:
            result = work()
        torch.set_rng_state(random)
        for captured, values in recorder._old.items():
            captured.bytes().copy_(values)
        return StandInGraph(recorder.calls, before, self._free(), self.random), result


class Use:
    """The graphs of one layer in one microbatch."""

    def __init__(self, layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.layer, self.args, self.kwargs = layer, args, kwargs
        self.inputs = [*tree_flatten(args)[0], *kwargs.values()]
        self.parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        self.forward: Any = None
        self.backward: Any = None
        self.weights: Any = None
        self.outputs: Any = None
        self.spec: Any = None
        self.output_grads: Any = None
        self.input_grads: Any = None
        self.delayed: list[Any] = []

    def run(self) -> Any:
        return self.layer(*self.args, **self.kwargs)

    @property
    def surface(self) -> list[torch.Tensor]:
        return [*self.inputs, *self.parameters]

    def differentiate(self, outputs: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
        """The gradients of the surface; those of its tensors are left as they were."""
        wanted = [each for each in self.surface if each.requires_grad]
        before = [each.grad for each in wanted]
        for each in wanted:
            each.grad = None
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        found = {id(each): each.grad for each in wanted}
        for each, grad in zip(wanted, before, strict=True):
            each.grad = grad
        return [found.get(id(each)) for each in self.surface]

    def warm_up(self) -> None:
        seen: list[Any] = []
        handles = [
            module.register_forward_hook(lambda module, *_: seen.append(module)) for module in self.layer.modules()
        ]
        outputs = tree_flatten(self.run())[0]
        for handle in handles:
            handle.remove()
        grads = self.differentiate(outputs, [torch.full_like(output, torch.nan) for output in outputs])
        used = {id(p) for p, grad in zip(self.surface, grads, strict=True) if grad is not None}
        self.parameters = [parameter for parameter in self.parameters if id(parameter) in used]
        of_engine = [module for module in seen if isinstance(module, TransformerEngineBaseModule)]
        self.delayed = [module for module in of_engine if module.need_backward_dw()]
        for module in self.delayed:
            module.backward_dw()


def make_graphed_callables(
    modules: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Any = None,
    fp8_enabled: Any = None,
    _order: Any = None,
    _num_layers_per_chunk: Any = None,
    retain_graph_in_backward: bool = False,
    _reuse_graph_input_output_buffers: bool = False,
) -> tuple[Any, ...]:
    assert not isinstance(fp8_enabled, tuple) or len(fp8_enabled) == len(modules)
    whole = [c for c in _order if ceil(c) == c]
    chunks = max(whole)
    microbatches = len(whole) // chunks // 2
    lengths = _num_layers_per_chunk
    assert chunks * microbatches * 2 == len(whole) and len(lengths) == chunks and sum(lengths) == len(modules)
    assert len(sample_args) == len(modules) * microbatches
    assert len(whole) == len(_order) or set(lengths) == {1}, "with W, a chunk must have one layer"
    for module in modules:
        assert not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
    uses: list[list[list[Use]]] = []
    for chunk, length in enumerate(lengths):
        first = sum(lengths[:chunk])
        own = modules[first : first + length]
        number = iter(range(first * microbatches, (first + length) * microbatches))
        uses.append(
            [
                [Use(each, sample_args[i], sample_kwargs[i]) for each, i in zip(own, number, strict=False)]
                for _ in range(microbatches)
            ]
        )
    flat = [use for of_chunk in uses for of_microbatch in of_chunk for use in of_microbatch]
    for use in flat:
        for _ in range(num_warmup_iters):
            use.warm_up()
        for module in use.layer.modules():
            if hasattr(module, "is_first_microbatch") and version() < (2, 16):
                module.is_first_microbatch = True
    _Capture(uses, _reuse_graph_input_output_buffers).run(_order)
    return tuple(map(_callable, flat))


class _Capture:
    def __init__(self, uses: list[list[list[Use]]], shares: bool) -> None:
        self._uses, self._shares = uses, shares
        self._pool = _Pool()
        self._grads: dict[Any, torch.Tensor] = {}
        self._before: Use | None = None
        self._forwards, self._backwards = [0] * len(uses), [0] * len(uses)

    def run(self, order: Sequence[float]) -> None:
        for place, entry in enumerate(order):
            chunk = ceil(abs(entry)) - 1 if entry > 0 else -ceil(entry) - 1
            if entry > 0:
                for use in self._uses[chunk][self._forwards[chunk]]:
                    self._forward(use)
                self._forwards[chunk] += 1
            elif ceil(entry) == entry:
                assert self._backwards[chunk] < self._forwards[chunk], f"entry {place}: backward before forward"
                for use in reversed(self._uses[chunk][self._backwards[chunk]]):
                    assert not use.delayed or order.count(entry) == order.count(entry - 0.5), "W entries do not match"
                    self._backward(use)
                self._backwards[chunk] += 1
            else:
                (use,) = self._uses[chunk][self._backwards[chunk] - 1]
                self._weights(use)

    def _forward(self, use: Use) -> None:
        with torch.enable_grad():
            use.forward, outputs = self._pool.capture(use.run)
        use.outputs, use.spec = tree_flatten(outputs)

    def _backward(self, use: Use) -> None:
        use.output_grads = [self._gradient(output) for output in use.outputs]
        use.backward, use.input_grads = self._pool.capture(lambda: use.differentiate(use.outputs, use.output_grads))
        use.outputs = [_Argument(self._pool.known(o, True), o) if self._shares else o.detach() for o in use.outputs]
        if self._shares:
            if self._before is not None:
                self._before.input_grads = [g if g is None else self._weak(g) for g in self._before.input_grads]
            self._before = use

    def _gradient(self, output: torch.Tensor) -> torch.Tensor:
        key = tuple(output.shape), output.dtype
        if not self._shares:
            return torch.empty_like(output)
        return self._grads.setdefault(key, torch.empty_like(output))

    def _weights(self, use: Use) -> None:
        assert use.delayed, "no module needs a W"
        if use.weights is not None:
            raise RuntimeError("this graph already owns a captured graph")

        def run() -> None:
            for module in use.delayed:
                module.backward_dw()

        use.weights, _ = self._pool.capture(run)

    def _weak(self, tensor: Any) -> Any:
        return tensor if isinstance(tensor, _Argument) else _Argument(self._pool.known(tensor, True), tensor)


def _read(tensor: Any) -> Any:
    return tensor.tensor() if isinstance(tensor, _Argument) else tensor


def _callable(use: Use) -> Callable[..., Any]:
    class Graphed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, flag: Any, *inputs: torch.Tensor) -> Any:
            for static, given in zip(use.inputs, inputs, strict=False):
                if static.dtype is torch.bool:
                    continue  # the mask of its capture, which is causal as TransformerEngine's attention itself
                static.detach().copy_(given.detach())
            use.forward.replay()
            return tuple(_read(output).detach() for output in use.outputs)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            for static, given in zip(use.output_grads, grads, strict=True):
                static.copy_(given)
            use.backward.replay()
            kept = use.input_grads[: len(use.inputs)], use.input_grads[-len(use.parameters) :]
            return None, *(None if g is None else _read(g).detach() for part in kept for g in part)

    def call(*args: Any, **kwargs: Any) -> Any:
        given = [*tree_flatten(args)[0], *(kwargs[name] for name in use.kwargs)]
        outputs = Graphed.apply(None, *given, *use.parameters)
        return tree_unflatten(list(outputs), use.spec)

    def backward_dw() -> None:
        if use.weights is not None:
            use.weights.replay()
            for module in use.delayed if version() >= (2, 13) else ():
                if module.need_backward_dw():
                    module._trigger_wgrad_accumulation_and_reduce_hooks()

    call.backward_dw, call.reset = backward_dw, lambda: None  # type: ignore[attr-defined]
    return call


@contextmanager
def graphs_on_cpu(num_microbatches: Callable[[], int]) -> Iterator[None]:
    """Context in which megatron-core's helper finds the fake, as it does where TransformerEngine is installed.

    Args:
        num_microbatches: of an iteration.
    """
    from megatron.core.transformer import cuda_graphs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graphs, "HAVE_TE_GRAPHS", True)
        patch.setattr(cuda_graphs, "make_graphed_callables", make_graphed_callables, raising=False)
        patch.setattr(cuda_graphs, "is_te_min_version", lambda least, **_: version() >= _numbers(least))
        patch.setattr(cuda_graphs, "get_num_microbatches", num_microbatches, raising=False)
        patch.setattr(torch.cuda, "set_stream", lambda stream: None)  # called by the helper of 0.14
        engine = sys.modules["transformer_engine.pytorch"]  # where Megatron-LM 0.13 looks it up
        patch.setattr(engine, "make_graphed_callables", make_graphed_callables, raising=False)
        yield


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")[:2]))
