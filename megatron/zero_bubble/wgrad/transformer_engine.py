"""The B/W split of TransformerEngine's linears, through the delayed weight gradient that they offer themselves.

Built with ``delay_wgrad_compute=True``, a ``Linear``, ``LayerNormLinear`` or ``GroupedLinear`` puts the operands of its
weight gradient into a queue of its own in its backward, and ``backward_dw`` computes the oldest in it by the call that
an undelayed backward makes (TransformerEngine 2.8 to 2.20, ``pytorch/module``: ``_common.WeightGradStore``,
``base.TransformerEngineBaseModule.backward_dw``). So W is theirs, FP8 included, and has the bits of an undelayed run;
this module says when.

* A put tells our ``WgradStore``, which runs the queue in its order.
* TransformerEngine expects each W before the next B of its module. Others may lie in between, since what autograd
  accumulates at B is kept with the W of that microbatch: the gradient of a bias that is added outside, or that is
  reduced before the quantization.
* megatron-core's DDP leaves its hooks to ``backward_dw``, as its own ``delay_wgrad_compute`` makes it.
* Within an unsplit backward the delay is off, and the hooks are called where DDP has them without it.

Nothing here imports TransformerEngine. ``patching`` puts ``build``, ``put`` and ``wrap`` in their places.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.wgrad.store import Product, WgradStore

SPLIT = ("Linear", "LayerNormLinear", "GroupedLinear")
"""The classes of ``transformer_engine.pytorch.module`` that are split. ``LayerNormMLP``, which Megatron does not use,
keeps its W in B."""

_OVERLAPS = {
    "ub_bulk_wgrad": "tp_comm_bulk_wgrad",
    "ub_bulk_dgrad": "tp_comm_bulk_dgrad",
    "ub_overlap_ag_dgrad": "tp_comm_overlap_ag",
}
"""Overlaps that a weight gradient cannot wait for, by Megatron's names: the first is computed with another's reduction;
the others gather its operands into a buffer that the next layer overwrites."""


class DelayedGradient:
    """The weight gradients of one use of a TransformerEngine module: the entry of its queue with the same number.

    Args:
        operands: the list that the module puts: input, output gradient and, for experts, where the results go.
    """

    gathers = False

    def __init__(self, module: _DelayedModule, operands: list[Any]) -> None:
        self._module = module
        self._operands = operands
        self.at_backward: dict[torch.nn.Parameter, torch.Tensor] = {}
        """What autograd accumulated in this microbatch, where it did."""

    @property
    def weight(self) -> torch.nn.Parameter:
        """The first expert's."""
        return self._module.weights[0]

    @property
    def num_elements(self) -> int:
        """Of the weights of all experts."""
        return sum(weight.numel() for weight in self._module.weights)

    @property
    def has_results(self) -> bool:
        """Whether the operands are followed by where the results go; its B then returns that for a gradient."""
        return len(self._operands) > 2

    def prefetch(self) -> None:
        """Nothing: under sequence parallelism the input was gathered in B."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """The operands, gathered under sequence parallelism; of quantized ones, the data and the scales."""
        own = self._operands[:2] if self._module.is_fused else self._operands  # else main_grad is among them
        yield from _flatten(own)
        yield from self.at_backward.values()

    def run(self) -> Iterable[Product]:
        """Their GEMM; its results go through the hooks of data parallelism here, so nothing is left to accumulate."""
        operands, self._operands = self._operands, []
        self._module.run(operands, self.at_backward)
        return ()


class _DelayedModule:
    """A module whose weight gradients wait.

    Attributes:
        weights: those that want a gradient; empty before ``adopt``, or where there are none.
    """

    def __init__(self, module: Any) -> None:
        self._module = weakref.ref(module)
        self._backward_dw: Callable[[Any], None] = _own_class(module).backward_dw  # past Megatron's wrappers of it
        self._accumulated: list[Any] = []
        self._unsettled: list[DelayedGradient] = []
        self._latest = -1
        self._biases: list[torch.nn.Parameter] = []
        self.weights: list[torch.nn.Parameter] = []

    @property
    def is_fused(self) -> bool:
        """Whether its GEMM accumulates into ``main_grad``."""
        return bool(self._alive.fuse_wgrad_accumulation)

    @property
    def _alive(self) -> Any:
        module = self._module()
        assert module is not None, "its gradients wait"
        return module

    def adopt(self) -> None:
        """Data parallelism is about to hook the parameters. The biases of frozen weights are hooked as if nothing
        waited: there will be no W.
        """
        parameters = dict(self._alive.named_parameters(recurse=False))
        waiting = {name: p for name, p in parameters.items() if getattr(p, "skip_backward_post_hook", False)}
        self.weights = [p for name, p in waiting.items() if name.startswith("weight") and p.requires_grad]
        self._biases = [p for name, p in waiting.items() if name.startswith("bias")]
        if not self.weights:
            for bias in self._biases:
                bias.skip_backward_post_hook = False  # type: ignore[attr-defined]
            self._biases = []

    def hook(self, make_hook: Callable[[torch.nn.Parameter], Callable[[], None]], waits: Callable[[], bool]) -> None:
        """Call the hooks of data parallelism where autograd accumulates as well, but for a backward that ``waits``."""

        def unless_it_waits(hook: Callable[[], None], *_: Any) -> None:
            if not waits():
                hook()

        for parameter in (*self.weights, *self._biases):
            if parameter.requires_grad:
                node: Any = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
                node.register_hook(functools.partial(unless_it_waits, make_hook(parameter)))
                self._accumulated.append(node)  # autograd keeps it weakly

    def use(self, operands: list[Any], microbatch: int) -> DelayedGradient:
        """Its backward is about to put ``operands`` into its queue.

        Raises:
            UserError: data parallelism does not know this module, or the first microbatch would overwrite others.
        """
        if not self._alive.wgrad_accumulation_and_reduce_hooks:
            raise UserError(
                "TransformerEngine's delayed weight gradients are taken by hooks that megatron-core's "
                f"DistributedDataParallel registers, but {type(self._alive).__name__} has none; wrap the model in it, "
                "after zero-bubble training was applied"
            )
        if self.is_fused and microbatch == 0 and self._latest > 0:
            raise UserError(
                "TransformerEngine overwrites main_grad with the gradients of microbatch 0, so its backward must come "
                f"first; the schedule runs that of microbatch {self._latest} before it; sort the backwards"
            )
        self._latest = microbatch
        self._unsettled.append(DelayedGradient(self, operands))
        return self._unsettled[-1]

    def settle(self) -> None:
        """Keep with the last uses what autograd accumulated since the last backward.

        Raises:
            UserError: a weight has a gradient that did not come through the queue.
        """
        uses, self._unsettled = self._unsettled, []
        for weight in self.weights:
            if weight.grad is None:
                continue
            known = getattr(weight, "grad_added_to_main_grad", False) or (uses and uses[-1].has_results)
            if not (uses and known):
                raise UserError(
                    f"a weight of {type(self._alive).__name__} got a gradient beside TransformerEngine's own, which "
                    "the delayed one would overwrite; use the weight in its module only (without TransformerEngine's "
                    "op fuser), or train with --transformer-impl local"
                )
            weight.grad = None  # a stand-in, as large as the weight, or where the result is not yet
        for bias in self._biases:
            if bias.grad is None:
                continue
            if not uses:
                raise UserError(
                    f"a bias of {type(self._alive).__name__} got a gradient and its weight none, so that no W takes it "
                    "along; freeze it with its weight before the model is wrapped in DistributedDataParallel"
                )
            for use in uses[:-1]:
                use.at_backward[bias] = torch.zeros_like(bias.grad)
            uses[-1].at_backward[bias] = bias.grad
            bias.grad = None

    @torch.no_grad()
    def run(self, operands: list[Any], at_backward: dict[torch.nn.Parameter, torch.Tensor]) -> None:
        """Compute the oldest in its queue, whose operands these are, as if its B had just been."""
        module = self._alive
        assert module.wgrad_store.context.queue[0][0] is operands, "W's of a module run in the order of its B's"
        for weight in self.weights:
            if getattr(weight, "grad_added_to_main_grad", False):
                weight.grad = _stand_in(weight)
        for bias in self._biases:
            bias.grad = at_backward.get(bias) if bias.requires_grad else _stand_in(bias)
        self._backward_dw(module)
        for bias in self._biases:
            bias.grad = None

    def clear(self) -> None:
        """Forget what waits; gradients are zeroed by whoever starts an iteration."""
        self._latest = -1
        self._unsettled.clear()


class TransformerEngineSplit:
    """Every TransformerEngine module that is built while the split is in force, and their part in W.

    Args:
        store: where W's take their gradients from.
    """

    def __init__(self, store: WgradStore) -> None:
        self._store = store
        self._built: weakref.WeakSet[Any] = weakref.WeakSet()
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()
        self._delayed: weakref.WeakKeyDictionary[Any, _DelayedModule] = weakref.WeakKeyDictionary()  # by its own store
        self._waits = True
        store.attach(self)

    def build(self, original: Callable[..., None]) -> Callable[..., None]:
        """The replacement for the constructor of one of ``SPLIT``; a caller that says itself whether to delay is left
        alone, and so is a weight in several parts, which ``backward_dw`` would compute into a copy.
        """

        @functools.wraps(original)
        def init(module: Any, *args: Any, **options: Any) -> None:
            ours = "delay_wgrad_compute" not in options and options.get("parameters_split") is None
            if ours:
                _check_overlaps(options.get)
                options["delay_wgrad_compute"] = True
            original(module, *args, **options)
            self._built.add(module)
            if ours:
                _check_overlaps(functools.partial(getattr, module))
                self._delayed[module.wgrad_store] = _DelayedModule(module)

        return init

    def put(self, original: Callable[..., None]) -> Callable[..., None]:
        """The replacement for ``WeightGradStore.put``."""

        @functools.wraps(original)
        def put(queue: Any, tensor_list: list[Any], func: Callable[..., Any]) -> None:
            module = self._delayed.get(queue)
            if module is not None:
                work = self._store.current
                if work is None:
                    raise _homeless()
                self._store.put(module.use(tensor_list, work.microbatch))
            original(queue, tensor_list, func)

        return put

    def wrap(self, original: Callable[..., None]) -> Callable[..., None]:
        """The replacement for the constructor of megatron-core's ``DistributedDataParallel``."""

        @functools.wraps(original)
        def init(ddp: Any, config: Any, ddp_config: Any, module: torch.nn.Module, *args: Any, **named: Any) -> None:
            delayed = [m for m in map(self._delayed_of, module.modules()) if m is not None]
            if not delayed:
                original(ddp, config, ddp_config, module, *args, **named)
                return
            if not hasattr(ddp_config, "delay_wgrad_compute"):
                raise UserError(
                    "zero-bubble schedules need a megatron-core whose DistributedDataParallel can delay its hooks "
                    "(delay_wgrad_compute, 0.14 or newer) for TransformerEngine layers; install one, or train with "
                    "--transformer-impl local"
                )
            for one in delayed:
                one.adopt()
            before, ddp_config.delay_wgrad_compute = ddp_config.delay_wgrad_compute, True
            try:
                original(ddp, config, ddp_config, module, *args, **named)
            finally:
                ddp_config.delay_wgrad_compute = before
            for one in delayed:
                one.hook(ddp._make_backward_post_hook, lambda: self._waits)

        return init

    def watch(self, chunks: Sequence[torch.nn.Module]) -> None:
        """See ``wgrad_store.Source``.

        Raises:
            UserError: a module was built before the split was in force.
        """
        for chunk in chunks:
            if chunk in self._watched:
                continue
            self._watched.add(chunk)
            for module in chunk.modules():
                if module not in self._built and (own := _own_class(module)) is not None and own.__name__ in SPLIT:
                    raise UserError(
                        f"zero-bubble training must be applied before the model is built, because {own.__name__} of "
                        "TransformerEngine is told in its constructor to leave its weight gradient to W; this one was "
                        "built before"
                    )

    @contextmanager
    def backward(self, split: bool) -> Iterator[None]:
        """See ``wgrad_store.Source``."""
        if split:
            yield
            for module in self._delayed.values():
                module.settle()
            return
        for queue in self._delayed:
            queue.disable_delay_wgrad_compute()
        self._waits = False
        try:
            yield
        finally:
            self._waits = True
            for queue in self._delayed:
                queue.enable_delay_wgrad_compute()

    def clear(self) -> None:
        """See ``wgrad_store.Source``; drops TransformerEngine's own queues."""
        for queue, module in self._delayed.items():
            module.clear()
            while not queue.context.empty():
                queue.context.get_nowait()

    def close(self) -> None:
        """The split is no longer in force: models that rely on it refuse to be trained."""
        self.clear()
        for queue in self._delayed:
            queue.context = _Closed()

    def _delayed_of(self, module: Any) -> _DelayedModule | None:
        queue = getattr(module, "wgrad_store", None)
        return None if queue is None else self._delayed.get(queue)


class _Closed:
    """In place of a module's queue that nobody would empty."""

    def put(self, _entry: Any) -> None:
        raise _homeless()

    def empty(self) -> bool:
        return True


def _check_overlaps(value_of: Callable[[str, bool], Any]) -> None:
    """Raises UserError where one of ``_OVERLAPS`` is on."""
    for name, option in _OVERLAPS.items():
        if value_of(name, False):
            raise UserError(
                "TransformerEngine's weight gradients can wait for W only where their operands are not in the buffers "
                f"of --tp-comm-overlap; got {option}=True; set it to False (--disable-{option.replace('_', '-')})"
            )


def _homeless() -> UserError:
    return UserError(
        "a TransformerEngine module that was built for a zero-bubble schedule ran a backward outside of one, where no "
        "W would compute its weight gradient; build the model anew after revert(), and on more than one pipeline stage"
    )


def _own_class(module: Any) -> Any:
    """The class of ``transformer_engine.pytorch.module`` that this is, below what others derive from it; or None."""
    known = (c for c in type(module).__mro__ if c.__module__.startswith("transformer_engine.pytorch.module."))
    return next(known, None)


def _flatten(operands: Iterable[Any]) -> Iterator[torch.Tensor]:
    for operand in operands:
        if hasattr(operand, "get_data_tensors"):
            yield from _flatten(operand.get_data_tensors())
        elif isinstance(operand, (list, tuple)):
            yield from _flatten(operand)
        elif isinstance(operand, torch.Tensor):
            yield operand


def _stand_in(parameter: torch.nn.Parameter) -> torch.Tensor:
    """A gradient that is only there to be there: DDP's hook adds none that is in ``main_grad``."""
    return torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
