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
* During an unsplit backward, the delay is off, and the hooks are called at the points where DDP calls them without it.
  It is off in a forward, too, where ``torch.autograd.grad`` may ask for gradients.
* A fused operation (TransformerEngine 2.14 and newer, ``pytorch/ops``) multiplies in the place of a module, whose
  weights megatron-core gives to it in the first forward. Its queue then is that of the module, which is all that DDP
  knows. Fused operations without a queue compute their weight gradients in B.
* A module inside of a CUDA graph delays its gradients only if W can be a graph of its own (``graphed``).
* A module runs its whole backward in B, as without the delay, if autograd must find its gradients there: if others have
  hooks on its parameters, or if something else multiplies, its own class or a fused operation without a queue. Such a
  module never uses its queue, which turns out in its first B.

This module does not import TransformerEngine. ``patching`` installs ``build``, ``delays``, ``put`` and ``wrap``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.engine.wgrad.delayed import DelayedModule, own_class
from megatron.zero_bubble.engine.wgrad.graphed import ReplayedGradients
from megatron.zero_bubble.engine.wgrad.store import WgradStore

SPLIT = ("Linear", "LayerNormLinear", "GroupedLinear")
"""The classes of ``transformer_engine.pytorch.module`` that are split. ``LayerNormMLP``, which Megatron does not use,
computes its weight gradients in B."""
FUSED = "GroupedLinear"
"""The operation of ``transformer_engine.pytorch.ops`` that has a queue."""


class Conflicts(NamedTuple):
    """Options of modules that cannot be on where gradients are deferred.

    Attributes:
        of_queue: those with which a module is built without a queue.
        of_passes: attributes that forward and backward read.
        line: what is said about those that are switched off.
    """

    of_queue: tuple[str, ...] = ()
    of_passes: tuple[str, ...] = ()
    line: Callable[[Sequence[str]], str] = str


class Graphed(NamedTuple):
    """The modules that run inside of CUDA graphs.

    Attributes:
        inside: those among the submodules of a module.
        has_w: whether their W can be a graph of its own.
    """

    inside: Callable[[torch.nn.Module], Iterable[torch.nn.Module]]
    has_w: bool = False


def _nothing(_: torch.nn.Module) -> Iterable[torch.nn.Module]:
    return ()


class TransformerEngineSplit:
    """Splits all TransformerEngine modules that are built while it is installed.

    Args:
        store: the store of deferred gradients that W passes run.
        by_rows: see ``quantized.keep_columns``.
        say: prints which modules do not defer their gradients, and what is switched off.
        conflicts: options of modules that cannot be on where gradients are deferred, and what is said about those that
            are switched off.
        graphed: the modules that run inside of CUDA graphs.
    """

    def __init__(
        self,
        store: WgradStore,
        by_rows: bool = False,
        say: Callable[[str], None] = lambda _: None,
        conflicts: Conflicts = Conflicts(),  # noqa: B008 (an immutable value)
        graphed: Graphed = Graphed(_nothing),  # noqa: B008
    ) -> None:
        self._store = store
        self._by_rows = by_rows
        self._conflicts = conflicts
        self._graphed = graphed
        self._captures = False
        self._say = functools.cache(say)  # a line once
        self._built: weakref.WeakSet[Any] = weakref.WeakSet()
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()
        # The keys are the modules' queues.
        self._delayed: weakref.WeakKeyDictionary[Any, DelayedModule] = weakref.WeakKeyDictionary()
        self._operations: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
        self._waits = True
        self._in_forward = False
        store.attach(self)

    def build(self, original: Callable[..., None]) -> Callable[..., None]:
        """The replacement for the constructor of the classes in ``SPLIT``.

        A caller who passes ``delay_wgrad_compute=True``, as megatron-core does with its own option, asks for what the
        schedule does. It does not change modules whose caller passes False, nor weights in several parts, whose
        gradient ``backward_dw`` would write to a copy.
        """

        @functools.wraps(original)
        def init(module: Any, *args: Any, **options: Any) -> None:
            ours = options.get("delay_wgrad_compute", True) and options.get("parameters_split") is None
            if ours:
                enabled = [name for name in self._conflicts.of_queue if options.get(name)]
                options |= dict.fromkeys(enabled, False) | {"delay_wgrad_compute": True}
            original(module, *args, **options)
            self._built.add(module)
            if ours:
                self._switch_off(module, enabled)
                self._delayed[module.wgrad_store] = DelayedModule(module)

        return init

    def build_operation(self, original: Callable[..., None]) -> Callable[..., None]:
        """The replacement for the constructor of ``FUSED``, which gets the weights of a module afterwards."""

        @functools.wraps(original)
        def init(operation: Any, *args: Any, **options: Any) -> None:
            original(operation, *args, **options | {"delay_wgrad_compute": True})
            for parameter in operation.parameters(recurse=False):
                parameter.skip_backward_post_hook = False  # of an operation on its own, whose backward is not split
            self._operations[operation.wgrad_store] = weakref.ref(operation)

        return init

    def _module_of(self, queue: Any) -> DelayedModule | None:
        """The module whose gradients a queue delays; of a fused operation, the one whose weights it has."""
        module, reference = self._delayed.get(queue), self._operations.get(queue)
        if module is None and reference is not None and torch._C._current_graph_task_id() != _NO_BACKWARD:
            operation: Any = reference()
            own = set(map(id, operation.parameters(recurse=False)))
            known = (each for each in self._delayed.values() if each.weights and id(each.weights[0]) in own)
            if (module := next(known, None)) is not None:
                module.multiplied_by(operation)
                self._delayed[queue] = module
        return module

    def _switch_off(self, module: Any, before: Sequence[str]) -> None:
        """Switch off what is in the way of delayed gradients; ``before`` has what was, before the build."""
        enabled = [*before, *(name for name in self._conflicts.of_passes if getattr(module, name, False))]
        for name in enabled:
            setattr(module, name, False)
        if enabled:
            self._say(self._conflicts.line(enabled))

    def delays(self, original: Callable[..., bool]) -> Callable[..., bool]:
        """The replacement for ``WeightGradStore.delay_wgrad_compute``, which every backward asks."""

        @functools.wraps(original)
        def delay_wgrad_compute(queue: Any) -> bool:
            module = self._module_of(queue)
            if module is None or not original(queue):
                return queue not in self._operations and original(queue)
            if self._in_forward and module.weights:
                self._store.wants(None, module.weights[0], module.weights[0])  # raises for a backward()
            return self._waits and self._delays_now(module)

        return delay_wgrad_compute

    def _delays_now(self, module: DelayedModule) -> bool:
        delays = module.decide()
        if module.is_hooked:
            self._say(
                f"{self._store.name_of(module.weights[0])} or its bias has hooks, so their gradients are computed in "
                "B, not in W"
            )
        return delays

    def put(self, original: Callable[..., None]) -> Callable[..., None]:
        """The replacement for ``WeightGradStore.put``."""

        @functools.wraps(original)
        def put(queue: Any, tensor_list: list[Any], func: Callable[..., Any]) -> None:
            module = None if self._captures else self._module_of(queue)
            if module is not None:
                work = self._store.current
                if work is None:
                    raise _outside_schedule()
                if module.weights and not self._store.wants(work, module.weights[0], module.weights[0]):
                    return
                self._store.put(module.use(tensor_list, work.microbatch, self._store.shared, self._by_rows))
            original(queue, tensor_list, func)

        return put

    def wrap(self, original: Callable[..., None]) -> Callable[..., None]:
        """The replacement for the constructor of megatron-core's ``DistributedDataParallel``."""

        @functools.wraps(original)
        def init(ddp: Any, config: Any, ddp_config: Any, module: torch.nn.Module, *args: Any, **named: Any) -> None:
            delayed = [m for m in map(self._delayed_of, module.modules()) if m is not None]
            can_delay = hasattr(ddp_config, "delay_wgrad_compute")
            for one in delayed:
                one.adopt()
            delayed = self._released(config, module, delayed, can_delay)
            if not delayed:
                original(ddp, config, ddp_config, module, *args, **named)
                return
            if not can_delay:
                raise UserError(
                    "zero-bubble schedules with TransformerEngine layers need megatron-core 0.14 or newer, whose "
                    "DistributedDataParallel has delay_wgrad_compute; upgrade it, or train with --transformer-impl "
                    "local"
                )
            before, ddp_config.delay_wgrad_compute = ddp_config.delay_wgrad_compute, True
            try:
                original(ddp, config, ddp_config, module, *args, **named)
            finally:
                ddp_config.delay_wgrad_compute = before
            for one in delayed:
                one.hook(ddp._make_backward_post_hook, lambda: self._waits)

        return init

    def _released(
        self, config: Any, chunk: torch.nn.Module, delayed: Sequence[DelayedModule], can_delay: bool
    ) -> list[DelayedModule]:
        """Release the modules inside of CUDA graphs that compute their gradients in B; returns the others.

        Args:
            can_delay: whether data parallelism has hooks that wait for W.
        """
        # Fused operations that multiply in the place of modules compute their gradients in B.
        has_w = can_delay and self._graphed.has_w and not getattr(config, "use_transformer_engine_op_fuser", False)
        for module in self._graphed.inside(chunk):
            one = self._delayed_of(module)
            if one is not None and not (has_w and one.can_be_graphed):
                one.release()
                del self._delayed[module.wgrad_store]
        left = set(map(id, self._delayed.values()))
        return [one for one in delayed if id(one) in left]

    @contextmanager
    def capturing(self, layer: torch.nn.Module) -> Iterator[Sequence[DelayedModule]]:
        """Context in which CUDA graphs of a layer are captured; yields the modules whose W is a graph of its own."""
        inside = map(self._delayed_of, self._graphed.inside(layer))
        own = [module for module in inside if module is not None and self._delays_now(module)]
        self._captures = True
        try:
            with ExitStack() as captures:
                for module in own:
                    captures.enter_context(module.captured())
                yield own
        finally:
            self._captures = False

    def replayed(self, modules: Sequence[DelayedModule], replay: Callable[[], None]) -> None:
        """Called in the backward of a graphed layer, after its B; ``replay`` runs its W."""

        def run() -> None:
            for module in modules:
                module.expect_replay()
            replay()

        if self._store.current is not None:
            self._store.put(ReplayedGradients([weight for module in modules for weight in module.weights], run))
            return
        before, self._waits = self._waits, True  # the module calls its hooks only if it delays
        try:
            run()
        finally:
            self._waits = before

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
                if module not in self._built and (own := own_class(module)) is not None and own.__name__ in SPLIT:
                    raise UserError(
                        "megatron.zero_bubble.apply() must be called before the model is built, because the "
                        f"constructor of TransformerEngine's {own.__name__} decides whether its weight gradient is "
                        "deferred; this model was built before; build it after apply()"
                    )

    def settle(self) -> None:
        """See ``wgrad_store.Source``."""
        for module in self._delayed.values():
            if module.settle():
                self._say(
                    f"{module.name} is a linear of TransformerEngine but its weights are multiplied by something else, "
                    "such as a fused operation, so their gradients are computed in B, not in W"
                )

    @contextmanager
    def forward(self) -> Iterator[None]:
        """See ``wgrad_store.Source``."""
        self._in_forward = True
        with self._undelayed():
            yield

    @contextmanager
    def backward(self, split: bool) -> Iterator[None]:
        """See ``wgrad_store.Source``."""
        if split:
            yield
            self.settle()
            return
        with self._undelayed():
            yield

    @contextmanager
    def _undelayed(self) -> Iterator[None]:
        self._waits = False
        try:
            yield
        finally:
            self._waits, self._in_forward = True, False

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

    def _delayed_of(self, module: Any) -> DelayedModule | None:
        queue = getattr(module, "wgrad_store", None)
        return None if queue is None else self._delayed.get(queue)


_NO_BACKWARD = -1


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
