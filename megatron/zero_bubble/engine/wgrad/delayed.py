"""One TransformerEngine module whose weight gradients are delayed; see ``wgrad.transformer_engine``."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.engine.wgrad import quantized
from megatron.zero_bubble.engine.wgrad.gradients import Product
from megatron.zero_bubble.engine.wgrad.hooks import GatedHook, ParameterHooks
from megatron.zero_bubble.engine.wgrad.operands import SharedGradients, copied
from megatron.zero_bubble.engine.wgrad.stand_in import stand_in_grad


class DelayedGradient:
    """The weight gradients of one use of a TransformerEngine module; corresponds to one entry of the module's queue.

    Args:
        operands: the list that the module puts into its queue: input, output gradient and, for experts, the results.
    """

    gathers = False

    def __init__(self, module: DelayedModule, operands: list[Any]) -> None:
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

    def copy(self, written: torch.Tensor) -> None:
        """See ``gradients.Deferred``."""
        for index, operand in enumerate(self._operands[:2]):
            if isinstance(operand, list):
                operand[:] = [copied(part, written) if _is_plain(part) else part for part in operand]
            elif _is_plain(operand):
                self._operands[index] = copied(operand, written)
            elif (rows := _plain_rows(operand)) is not None:
                operand.rowwise_data = copied(rows, written)

    def operands(self) -> Iterator[torch.Tensor]:
        """Input and output gradient, unless they are quantized: TransformerEngine then completes their data at W."""
        for operand in self._operands[:2]:
            parts = operand if isinstance(operand, (list, tuple)) else (operand, _plain_rows(operand))
            yield from filter(_is_plain, parts)

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


class DelayedModule:
    """A TransformerEngine module with deferred weight gradients.

    Attributes:
        weights: weights that require a gradient; empty before ``adopt``.
        is_hooked: whether others than data parallelism have hooks on its parameters.
    """

    def __init__(self, module: Any) -> None:
        self._module = weakref.ref(module)
        self._operation: weakref.ref[Any] | None = None
        self._backward_dw: Callable[[Any], None] = own_class(module).backward_dw  # bypasses Megatron's overrides
        self._unsettled: list[DelayedGradient] = []
        self._latest = -1
        self._biases: list[torch.nn.Parameter] = []
        self._hooks: dict[torch.nn.Parameter, Callable[[], None]] = {}
        self._others = ParameterHooks()
        self._num_waiting = 0
        self._has_been_used = False
        self._multiplies = False  # by itself
        self._is_graphed = False
        self.is_hooked = False
        self.weights: list[torch.nn.Parameter] = []

    @property
    def name(self) -> str:
        """Of its class, for messages."""
        return type(self._alive).__name__

    @property
    def delays(self) -> bool:
        """Whether the gradients of the running backward wait for W."""
        return not (self._multiplies or self.is_hooked)

    def decide(self) -> bool:
        """Decide at the beginning of a backward of the module whether its gradients wait; returns ``delays``.

        autograd calls the hooks of parameters during B, where it must find the gradients. As long as earlier gradients
        wait, so do all: they are added in the order of the microbatches.
        """
        if not self._num_waiting:
            self.is_hooked = any(map(self._others.are_on, self._hooks))
        return self.delays

    @property
    def is_fused(self) -> bool:
        """Whether the module's GEMM accumulates into ``main_grad``."""
        return bool(self._alive.fuse_wgrad_accumulation)

    @property
    def can_be_graphed(self) -> bool:
        """Whether a CUDA graph of W computes all that W does: it runs no Python, which would assign gradients."""
        return bool(self.weights) and self.is_fused and not getattr(self._alive, "use_bias", False)

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Context in which a CUDA graph of W is captured; after it, ``expect_replay`` is called before its replays."""
        module = self._alive
        module.backward_dw = functools.partial(self._backward_dw, module)
        try:
            yield
        finally:
            del module.backward_dw
        self._is_graphed = True

    def expect_replay(self) -> None:
        """Give the weights gradients for the hooks that are called after a replay of W.

        Raises:
            UserError: others have hooks on its parameters, and expect gradients in B.
        """
        if not self.decide():
            raise UserError(
                "hooks on parameters inside of CUDA graphs must be registered before the graphs are captured; got new "
                f"ones on {self.name}; register them earlier, or set --cuda-graph-impl none"
            )
        for weight in self.weights:
            weight.grad = stand_in_grad(weight)

    def release(self) -> None:
        """Never delay the gradients: the parameters get the ordinary hooks of data parallelism."""
        for parameter in self._alive.parameters(recurse=False):
            parameter.skip_backward_post_hook = False
        self._alive.wgrad_store.disable_delay_wgrad_compute()

    @property
    def _alive(self) -> Any:
        module = self._module()
        assert module is not None, "the module was deleted while its gradients are deferred"
        return module

    def multiplied_by(self, operation: Any) -> None:
        """From now on, a fused operation with the weights of this module multiplies, and has the queue."""
        self._operation = weakref.ref(operation)

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
        for parameter in (*self.weights, *self._biases):
            if parameter.requires_grad:
                node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
                self._hooks[parameter] = make_hook(parameter)
                node.register_hook(GatedHook(self._hooks[parameter], lambda: self._waits_if(waits())))
                self._others.watch([parameter])  # autograd has only a weak reference to the node

    def _waits_if(self, waits: bool) -> bool:
        """Whether the hooks wait; those of a graph are called behind its W also where no other gradients wait."""
        return self.delays and (waits or self._is_graphed)

    def use(self, operands: list[Any], microbatch: int, shared: SharedGradients, by_rows: bool) -> DelayedGradient:
        """Make the entry for ``operands``; called before the module's backward puts them into its queue.

        Args:
            shared: copies output gradients that others may write to.
            by_rows: see ``quantized.keep_columns``.

        Raises:
            UserError: data parallelism has no hooks on this module, or the gradient of microbatch 0 would overwrite
                those of other microbatches.
        """
        if not self._alive.wgrad_accumulation_and_reduce_hooks:
            raise UserError(
                "TransformerEngine's delayed weight gradients need the hooks of megatron-core's "
                f"DistributedDataParallel, but {self.name} has none; wrap the model in it after "
                "megatron.zero_bubble.apply()"
            )
        if self._operation is None and self.is_fused and microbatch == 0 and self._latest > 0:
            raise UserError(
                "TransformerEngine overwrites main_grad with the gradients of microbatch 0, so the backward of "
                f"microbatch 0 must come first; the schedule runs microbatch {self._latest} before it; sort the "
                "backwards"
            )
        if any(map(self._others.are_on, self._hooks)):
            raise UserError(
                "the hooks of a parameter of a TransformerEngine module must be registered before the backwards of an "
                f"iteration, some of which wait for W already; got new ones on {self.name}; register them earlier"
            )
        self._latest, self._has_been_used = microbatch, True
        self._num_waiting += 1
        quantized.keep_columns(operands[1], by_rows)
        self._keep(operands, shared)
        self._unsettled.append(DelayedGradient(self, operands))
        return self._unsettled[-1]

    def _keep(self, operands: list[Any], shared: SharedGradients) -> None:
        """Replace the output gradients by what W can keep."""
        grads = operands[1] = list(operands[1]) if isinstance(operands[1], tuple) else operands[1]
        if isinstance(grads, list):
            pairs = zip(self.weights, grads, strict=False)
            grads[:] = [shared.kept(weight, grad) if _is_plain(grad) else grad for weight, grad in pairs]
        elif _is_plain(grads):
            operands[1] = shared.kept(self.weights[0], grads)
        elif (rows := _plain_rows(grads)) is not None:
            grads.rowwise_data = shared.kept(self.weights[0], rows)

    def settle(self) -> bool:
        """Move the gradients that autograd accumulated in this backward to the entries of this backward.

        Returns:
            whether it turned out now that the module multiplies by itself, and so cannot delay its gradients.

        Raises:
            UserError: a weight has a gradient that did not come through the queue, or a bias has one without its
                weight.
        """
        if not self.delays:
            return False
        uses, self._unsettled = self._unsettled, []
        if not self._has_been_used and any(weight.grad is not None for weight in self.weights):
            self._multiplies = True
            for parameter, hook in self._hooks.items():
                if parameter.grad is not None:
                    hook()  # which the gate has held back
            return True
        for weight in self.weights:
            if weight.grad is None:
                continue
            known = getattr(weight, "grad_added_to_main_grad", False) or (uses and uses[-1].has_results)
            if not (uses and known):
                raise UserError(
                    f"a weight of {self.name} got another gradient than TransformerEngine's, which "
                    "the delayed gradient would overwrite; use the weight in its module only (without "
                    "TransformerEngine's op fuser), or train with --transformer-impl local"
                )
            weight.grad = None  # a dummy of the weight's size, or the tensor for a result not computed yet
        for bias in self._biases:
            if bias.grad is None:
                continue
            if not uses:
                raise UserError(
                    f"a bias of {self.name} got a gradient but its weight got none, so no W pass "
                    "would accumulate it; freeze the bias with its weight before the model is wrapped in "
                    "DistributedDataParallel"
                )
            for use in uses[:-1]:
                use.at_backward[bias] = torch.zeros_like(bias.grad)
            uses[-1].at_backward[bias] = bias.grad
            bias.grad = None
        return False

    @torch.no_grad()
    def run(self, operands: list[Any], at_backward: dict[torch.nn.Parameter, torch.Tensor]) -> None:
        """Compute the oldest entry of the queue, which has these ``operands``, as if its B had just run."""
        module = self._alive
        operation: Any = module if self._operation is None else self._operation()
        assert operation.wgrad_store.context.queue[0][0] is operands, "W passes of a module must run in the order of B"
        for weight in self.weights:
            if getattr(weight, "grad_added_to_main_grad", False):
                weight.grad = stand_in_grad(weight)
        for bias in self._biases:
            bias.grad = at_backward.get(bias) if bias.requires_grad else stand_in_grad(bias)
        if operation is module:
            self._backward_dw(module)
        else:
            operation.backward_dw()
            for hook in module.wgrad_accumulation_and_reduce_hooks:
                hook()
        self._num_waiting -= 1
        for bias in self._biases:
            bias.grad = None

    def clear(self) -> None:
        """Discard deferred gradients; the caller zeroes the accumulated ones."""
        self._latest = -1
        self._num_waiting = 0
        self._unsettled.clear()


def _is_plain(operand: Any) -> bool:
    """Whether an operand is a tensor in high precision."""
    return isinstance(operand, torch.Tensor) and not hasattr(operand, "update_usage") and not _is_grouped(operand)


def _is_grouped(operand: Any) -> bool:
    """Whether an operand has the tokens of all experts in one piece, as fused operations keep it."""
    return hasattr(operand, "rowwise_data")


def _plain_rows(operand: Any) -> torch.Tensor | None:
    """The tensor in high precision that a grouped operand has; None for others."""
    return operand.rowwise_data if _is_grouped(operand) and operand.quantizer is None else None


def own_class(module: Any) -> Any:
    """The base class of ``module`` that TransformerEngine's ``pytorch.module`` package defines, or None."""
    known = (c for c in type(module).__mro__ if c.__module__.startswith("transformer_engine.pytorch.module."))
    return next(known, None)
