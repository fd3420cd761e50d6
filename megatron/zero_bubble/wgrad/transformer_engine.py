"""Splits the backward of TransformerEngine's linears into B and W, with TransformerEngine's delayed weight gradients.

A ``Linear``, ``LayerNormLinear`` or ``GroupedLinear`` built with ``delay_wgrad_compute=True`` puts the operands of its
weight gradient into the module's queue during backward. ``backward_dw`` computes the oldest entry with the same call as
an undelayed backward (TransformerEngine 2.8 to 2.20, ``pytorch/module``: ``_common.WeightGradStore``,
``base.TransformerEngineBaseModule.backward_dw``). So TransformerEngine computes W, including FP8, bit for bit as
without the delay, and this module only decides when.

* Every ``put`` into a queue also adds an entry to our ``WgradStore``, which runs the queues in its order.
* TransformerEngine expects each W before the next B of the same module. Here several B passes can precede a W, so the
  gradients that autograd accumulates at B are kept with the W of their microbatch: those of a bias that is added
  outside the module, or that is reduced before the quantization.
* megatron-core's DDP lets ``backward_dw`` call its hooks, as with its own ``delay_wgrad_compute``.
* During an unsplit backward the delay is off, and the hooks are called at the points where DDP calls them without it.

This module does not import TransformerEngine. ``patching`` installs ``build``, ``put`` and ``wrap``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.wgrad import quantized
from megatron.zero_bubble.wgrad.overlaps import check_overlaps
from megatron.zero_bubble.wgrad.stand_in import stand_in_grad
from megatron.zero_bubble.wgrad.store import Product, WgradStore

SPLIT = ("Linear", "LayerNormLinear", "GroupedLinear")
"""The classes of ``transformer_engine.pytorch.module`` that are split. ``LayerNormMLP``, which Megatron does not use,
computes its weight gradients in B."""


class DelayedGradient:
    """The weight gradients of one use of a TransformerEngine module; corresponds to one entry of the module's queue.

    Args:
        operands: the list that the module puts into its queue: input, output gradient and, for experts, the results.
    """

    gathers = False

    def __init__(self, module: _DelayedModule, operands: list[Any]) -> None:
        self._module = module
        self._operands = operands
        self.at_backward: dict[torch.nn.Parameter, torch.Tensor] = {}
        """Gradients that autograd accumulated at B of this microbatch, by parameter."""

    @property
    def weight(self) -> torch.nn.Parameter:
        """The weight of the module, or of its first expert."""
        return self._module.weights[0]

    @property
    def num_elements(self) -> int:
        """Number of elements of the weight, or of the weights of all experts."""
        return sum(weight.numel() for weight in self._module.weights)

    @property
    def has_results(self) -> bool:
        """Whether the operands include the tensors for the results, which B then returns as gradients."""
        return len(self._operands) > 2

    def prefetch(self) -> None:
        """Do nothing: under sequence parallelism, B has already gathered the input."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """The operands, gathered under sequence parallelism; for quantized operands, their data and scales."""
        own = self._operands[:2] if self._module.is_fused else self._operands  # fused: the others are main_grad
        yield from quantized.tensors(own)
        yield from self.at_backward.values()

    def run(self) -> Iterable[Product]:
        """Run TransformerEngine's GEMM and the data-parallel hooks; returns nothing for the accumulator."""
        operands, self._operands = self._operands, []
        self._module.run(operands, self.at_backward)
        return ()


class _DelayedModule:
    """A TransformerEngine module with deferred weight gradients.

    Attributes:
        weights: weights that require a gradient; empty before ``adopt``.
    """

    def __init__(self, module: Any) -> None:
        self._module = weakref.ref(module)
        self._backward_dw: Callable[[Any], None] = _own_class(module).backward_dw  # bypasses Megatron's overrides
        self._accumulated: list[Any] = []
        self._unsettled: list[DelayedGradient] = []
        self._latest = -1
        self._biases: list[torch.nn.Parameter] = []
        self.weights: list[torch.nn.Parameter] = []

    @property
    def is_fused(self) -> bool:
        """Whether the module's GEMM accumulates into ``main_grad``."""
        return bool(self._alive.fuse_wgrad_accumulation)

    @property
    def _alive(self) -> Any:
        module = self._module()
        assert module is not None, "the module was deleted while its gradients are deferred"
        return module

    def adopt(self) -> None:
        """Collect weights and biases; called before data parallelism registers its hooks on the parameters.

        Biases of frozen weights get the ordinary hooks, because their module has no W pass.
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
        """Call the data-parallel hooks also when autograd accumulates, except while ``waits()`` is true (split B)."""

        def unless_it_waits(hook: Callable[[], None], *_: Any) -> None:
            if not waits():
                hook()

        for parameter in (*self.weights, *self._biases):
            if parameter.requires_grad:
                node: Any = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
                node.register_hook(functools.partial(unless_it_waits, make_hook(parameter)))
                self._accumulated.append(node)  # autograd has only a weak reference

    def use(self, operands: list[Any], microbatch: int) -> DelayedGradient:
        """Make the entry for ``operands``; called before the module's backward puts them into its queue.

        Raises:
            UserError: data parallelism has no hooks on this module, or the gradient of microbatch 0 would overwrite
                those of other microbatches.
        """
        if not self._alive.wgrad_accumulation_and_reduce_hooks:
            raise UserError(
                "TransformerEngine's delayed weight gradients need the hooks of megatron-core's "
                f"DistributedDataParallel, but {type(self._alive).__name__} has none; wrap the model in it after "
                "megatron.zero_bubble.apply()"
            )
        if self.is_fused and microbatch == 0 and self._latest > 0:
            raise UserError(
                "TransformerEngine overwrites main_grad with the gradients of microbatch 0, so the backward of "
                f"microbatch 0 must come first; the schedule runs microbatch {self._latest} before it; sort the "
                "backwards"
            )
        self._latest = microbatch
        quantized.keep_columns(operands[1])
        self._unsettled.append(DelayedGradient(self, operands))
        return self._unsettled[-1]

    def settle(self) -> None:
        """Move the gradients that autograd accumulated in this backward to the entries of this backward.

        Raises:
            UserError: a weight has a gradient that did not come through the queue, or a bias has one without its
                weight.
        """
        uses, self._unsettled = self._unsettled, []
        for weight in self.weights:
            if weight.grad is None:
                continue
            known = getattr(weight, "grad_added_to_main_grad", False) or (uses and uses[-1].has_results)
            if not (uses and known):
                raise UserError(
                    f"a weight of {type(self._alive).__name__} got another gradient than TransformerEngine's, which "
                    "the delayed gradient would overwrite; use the weight in its module only (without "
                    "TransformerEngine's op fuser), or train with --transformer-impl local"
                )
            weight.grad = None  # a dummy of the weight's size, or the tensor for a result not computed yet
        for bias in self._biases:
            if bias.grad is None:
                continue
            if not uses:
                raise UserError(
                    f"a bias of {type(self._alive).__name__} got a gradient but its weight got none, so no W pass "
                    "would accumulate it; freeze the bias with its weight before the model is wrapped in "
                    "DistributedDataParallel"
                )
            for use in uses[:-1]:
                use.at_backward[bias] = torch.zeros_like(bias.grad)
            uses[-1].at_backward[bias] = bias.grad
            bias.grad = None

    @torch.no_grad()
    def run(self, operands: list[Any], at_backward: dict[torch.nn.Parameter, torch.Tensor]) -> None:
        """Compute the oldest entry of the queue, which has these ``operands``, as if its B had just run."""
        module = self._alive
        assert module.wgrad_store.context.queue[0][0] is operands, "W passes of a module must run in the order of B"
        for weight in self.weights:
            if getattr(weight, "grad_added_to_main_grad", False):
                weight.grad = stand_in_grad(weight)
        for bias in self._biases:
            bias.grad = at_backward.get(bias) if bias.requires_grad else stand_in_grad(bias)
        self._backward_dw(module)
        for bias in self._biases:
            bias.grad = None

    def clear(self) -> None:
        """Discard deferred gradients; the caller zeroes the accumulated ones."""
        self._latest = -1
        self._unsettled.clear()


class TransformerEngineSplit:
    """Splits all TransformerEngine modules that are built while it is installed.

    Args:
        store: the store of deferred gradients that W passes run.
    """

    def __init__(self, store: WgradStore) -> None:
        self._store = store
        self._built: weakref.WeakSet[Any] = weakref.WeakSet()
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()
        # The keys are the modules' queues.
        self._delayed: weakref.WeakKeyDictionary[Any, _DelayedModule] = weakref.WeakKeyDictionary()
        self._waits = True
        store.attach(self)

    def build(self, original: Callable[..., None]) -> Callable[..., None]:
        """The replacement for the constructor of the classes in ``SPLIT``.

        It does not change modules whose caller passes ``delay_wgrad_compute``, nor weights in several parts, whose
        gradient ``backward_dw`` would write to a copy.
        """

        @functools.wraps(original)
        def init(module: Any, *args: Any, **options: Any) -> None:
            ours = "delay_wgrad_compute" not in options and options.get("parameters_split") is None
            if ours:
                check_overlaps(options.get)
                options["delay_wgrad_compute"] = True
            original(module, *args, **options)
            self._built.add(module)
            if ours:
                check_overlaps(functools.partial(getattr, module))
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
                    raise _outside_schedule()
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
                    "zero-bubble schedules with TransformerEngine layers need megatron-core 0.14 or newer, whose "
                    "DistributedDataParallel has delay_wgrad_compute; upgrade it, or train with --transformer-impl "
                    "local"
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
            UserError: a module was built before the split was installed.
        """
        for chunk in chunks:
            if chunk in self._watched:
                continue
            self._watched.add(chunk)
            for module in chunk.modules():
                if module not in self._built and (own := _own_class(module)) is not None and own.__name__ in SPLIT:
                    raise UserError(
                        "megatron.zero_bubble.apply() must be called before the model is built, because the "
                        f"constructor of TransformerEngine's {own.__name__} decides whether its weight gradient is "
                        "deferred; this model was built before; build it after apply()"
                    )

    def settle(self) -> None:
        """See ``wgrad_store.Source``."""
        for module in self._delayed.values():
            module.settle()

    @contextmanager
    def backward(self, split: bool) -> Iterator[None]:
        """See ``wgrad_store.Source``."""
        if split:
            yield
            self.settle()
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
        """Uninstall the split; models built while it was installed then raise UserError in backward."""
        self.clear()
        for queue in self._delayed:
            queue.context = _Closed()

    def _delayed_of(self, module: Any) -> _DelayedModule | None:
        queue = getattr(module, "wgrad_store", None)
        return None if queue is None else self._delayed.get(queue)


class _Closed:
    """Replaces the queue of a module after ``close``, when no W pass would empty it."""

    def put(self, _entry: Any) -> None:
        raise _outside_schedule()

    def empty(self) -> bool:
        return True


def _outside_schedule() -> UserError:
    return UserError(
        "a TransformerEngine module built for a zero-bubble schedule ran a backward outside a zero-bubble schedule, so "
        "its deferred weight gradient would be lost; build the model again after revert(), and use more than one "
        "pipeline stage"
    )


def _own_class(module: Any) -> Any:
    """The base class of ``module`` that TransformerEngine's ``pytorch.module`` package defines, or None."""
    known = (c for c in type(module).__mro__ if c.__module__.startswith("transformer_engine.pytorch.module."))
    return next(known, None)
