"""A fake of the parts of TransformerEngine that zero-bubble training uses: plain torch, on the CPU.

Its modules delay weight gradients by TransformerEngine's rules:

- Each module has a queue, whose ``pop`` raises if the queue is empty.
- ``backward_dw`` overwrites ``weight.grad``, leaves a bias that already has a gradient alone, and calls the hooks.
- With fused accumulation, the first microbatch overwrites ``main_grad``, and B returns a placeholder gradient.
- With ``fp8``, the bias gradient is reduced at B, before the output gradient is quantized, row-wise and column-wise.
"""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

VERSION = "2.8.0+stand.in"


class WeightGradStore:
    def __init__(self, delay_wgrad_compute: bool = False, ub_bulk_wgrad: bool = False) -> None:
        assert not (delay_wgrad_compute and ub_bulk_wgrad), "bulk weight gradients cannot be delayed"
        self.context: Any = queue.Queue() if delay_wgrad_compute else None
        self.enabled = delay_wgrad_compute

    def delay_wgrad_compute(self) -> bool:
        return self.enabled

    def enable_delay_wgrad_compute(self) -> None:
        self.enabled = True

    def disable_delay_wgrad_compute(self) -> None:
        self.enabled = False

    def put(self, tensor_list: list[Any], func: Callable[..., Any]) -> None:
        assert self.enabled
        self.context.put([tensor_list, func])

    def pop(self) -> tuple[Any, list[Any]]:
        assert self.enabled
        if not self.context.qsize():
            raise RuntimeError("nothing to pop")
        tensor_list, func = self.context.get()
        return func(*tensor_list), tensor_list


class TransformerEngineBaseModule(torch.nn.Module):
    """Base class with ``num_gemms`` weights and biases; a single weight has no number in its name."""

    def __init__(
        self, names: Sequence[str], shape: tuple[int, int], fused: bool, bias: bool, return_bias: bool, dtype: Any
    ) -> None:
        super().__init__()
        self.weight_names = [f"weight{name}" for name in names]
        self.bias_names = [f"bias{name}" for name in names]
        self.use_bias, self.apply_bias = bias, bias and not return_bias
        self.fuse_wgrad_accumulation, self.fp8 = fused, False
        self.wgrad_accumulation_and_reduce_hooks: list[Callable[[], None]] = []
        for weight_name, bias_name in zip(self.weight_names, self.bias_names, strict=True):
            self.register_parameter(weight_name, torch.nn.Parameter(torch.randn(shape[::-1], dtype=dtype)))
            if bias:
                self.register_parameter(bias_name, torch.nn.Parameter(torch.randn(shape[1], dtype=dtype)))

    def delay(self, delay_wgrad_compute: bool, ub_bulk_wgrad: bool = False) -> None:
        self.wgrad_store = WeightGradStore(delay_wgrad_compute, ub_bulk_wgrad)
        if self.wgrad_store.delay_wgrad_compute():
            for name, parameter in self.named_parameters():
                if name in self.weight_names + self.bias_names:
                    parameter.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        self.wgrad_accumulation_and_reduce_hooks.append(hook)

    def need_backward_dw(self) -> bool:
        return self.wgrad_store.delay_wgrad_compute()

    @torch.no_grad()
    def backward_dw(self) -> None:
        if not self.need_backward_dw():
            return
        (weight_grad, bias_grad), _ = self.wgrad_store.pop()
        self._take([weight_grad], [bias_grad])

    def _take(self, weight_grads: Sequence[Any], bias_grads: Sequence[Any]) -> None:
        for weight_name, bias_name, weight_grad, bias_grad in zip(
            self.weight_names, self.bias_names, weight_grads, bias_grads, strict=True
        ):
            weight = getattr(self, weight_name)
            if not self.fuse_wgrad_accumulation:
                weight.grad = weight_grad.to(weight.dtype)
            bias = getattr(self, bias_name, None)
            if bias is not None and bias.grad is None:
                bias.grad = bias_grad.to(bias.dtype)
        self._trigger_wgrad_accumulation_and_reduce_hooks()

    def _trigger_wgrad_accumulation_and_reduce_hooks(self) -> None:
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()

    def _multiply(self, x: torch.Tensor, splits: Sequence[int], is_first_microbatch: bool | None) -> torch.Tensor:
        weights = [getattr(self, name) for name in self.weight_names]
        biases = [getattr(self, name) if self.apply_bias else None for name in self.bias_names]
        return _Multiply.apply(x, self, splits, is_first_microbatch, *weights, *biases)


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, module: Any, splits: Sequence[int], is_first: bool | None, *both: Any) -> Any:
        weights, biases = both[: len(splits)], both[len(splits) :]
        x = _quantized(x) if module.fp8 else x
        ctx.save_for_backward(x, *weights)
        ctx.module, ctx.splits, ctx.is_first, ctx.biases = module, splits, is_first, biases
        ctx.weights = weights  # saved-tensor hooks may return others, without main_grad
        parts = zip(x.split(list(splits)), weights, biases, strict=True)
        return torch.cat([part @ w.t() if b is None else part @ w.t() + b for part, w, b in parts])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        module, splits = ctx.module, list(ctx.splits)
        x, *weights = ctx.saved_tensors
        bias_grads: list[Any] = [None] * len(splits)
        if module.fp8:
            bias_grads = [b if b is None else g.sum(0) for b, g in zip(ctx.biases, grad.split(splits), strict=True)]
            grad = _quantized(grad)
        xs, grads = list(x.split(splits)), list(grad.split(splits))
        x_grad = torch.cat([g @ w for g, w in zip(grads, weights, strict=True)])
        weight_grads: list[Any] = [None] * len(splits)
        if weights[0].requires_grad:
            weight_grads, late = _weight_gradients(ctx, xs, grads, ctx.weights)
            bias_grads = [late[i] if b is None else b for i, b in enumerate(bias_grads)]
        return x_grad, None, None, None, *weight_grads, *bias_grads


def _weight_gradients(ctx: Any, xs: list[Any], grads: list[Any], weights: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return what a backward returns for weights and biases: the gradients, or placeholders for delayed ones."""
    module, fp8, fused = ctx.module, ctx.module.fp8, ctx.module.fuse_wgrad_accumulation
    outs = [w.main_grad if fused else torch.full_like(w, torch.nan) for w in weights]
    accumulate = fused and not ctx.is_first

    if fp8:
        kind = NVFP4 if fp8 == "nvfp4" else Quantized
        grads = [kind(grad) for grad in grads]

    def gemm(x: torch.Tensor, grad: Any, out: torch.Tensor, bias: Any) -> tuple[torch.Tensor, Any]:
        grad = grad.from_columns() if fp8 else grad
        product = grad.t().to(out.dtype) @ x.to(out.dtype)
        out.add_(product) if accumulate else out.copy_(product)
        return out, None if bias is None or fp8 else grad.sum(0)

    def grouped(xs: list[Any], grads: list[Any], outs: list[Any]) -> tuple[None, list[Any], None]:
        return None, [gemm(*one)[1] for one in zip(xs, grads, outs, ctx.biases, strict=True)], None

    is_grouped = isinstance(module, GroupedLinear)
    late: list[Any] = [None] * len(xs)
    if not module.wgrad_store.delay_wgrad_compute():
        late = grouped(xs, grads, outs)[1]
    elif is_grouped:
        module.wgrad_store.put([xs, grads, outs], grouped)
    else:
        module.wgrad_store.put([xs[0], grads[0]], lambda x, grad: gemm(x, grad, outs[0], ctx.biases[0]))
    for weight in weights if fused else ():
        weight.grad_added_to_main_grad = True
    if fused:
        return [torch.full_like(w, torch.nan) for w in weights], late  # NaN: adding a placeholder is noticed
    is_delayed = module.wgrad_store.delay_wgrad_compute()
    return ([None] * len(outs) if is_delayed and not is_grouped else outs), late


class Quantized:
    """A quantized tensor in two halves, as MXFP8's: neither can be made from the other. It is no ``torch.Tensor``."""

    def __init__(self, x: torch.Tensor) -> None:
        self.rows: torch.Tensor | None = x.clone()
        self.columns: torch.Tensor | None = x.t().contiguous()

    def from_columns(self) -> torch.Tensor:
        assert self.columns is not None, "a weight gradient needs the column-wise half"
        return self.columns.t()

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        if (rowwise_usage and self.rows is None) or (columnwise_usage and self.columns is None):
            raise RuntimeError("a half was requested that is missing")
        self.rows = None if rowwise_usage is False else self.rows
        self.columns = None if columnwise_usage is False else self.columns

    def get_data_tensors(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return self.rows, self.columns


class NVFP4(Quantized):
    """Each half has also a scale of the tensor. Before 2.11, a product uses that of the rows, or does not scale."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__(x / 8)
        self._amax_rowwise: torch.Tensor | None = torch.tensor(8.0)

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        super().update_usage(rowwise_usage, columnwise_usage)
        self._amax_rowwise = None if self.rows is None else self._amax_rowwise

    def from_columns(self) -> torch.Tensor:
        version = sys.modules["transformer_engine"].__version__
        finds_scale = self._amax_rowwise is not None or int(version.split(".")[1]) >= 11
        return super().from_columns() * (8 if finds_scale else 1)


def _quantized(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e5m2).to(x.dtype)


class Linear(TransformerEngineBaseModule):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        fuse_wgrad_accumulation: bool = False,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: Any = None,
        parameters_split: Any = None,
        parallel_mode: Any = None,
        ub_overlap_ag: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        delay_wgrad_compute: bool = False,
    ) -> None:
        shape = (in_features, out_features)
        super().__init__([""], shape, fuse_wgrad_accumulation, bias, return_bias, params_dtype)
        self.return_bias = return_bias
        self.ub_bulk_dgrad = ub_bulk_dgrad and parallel_mode == "column"
        self.ub_overlap_ag_dgrad = ub_overlap_ag and parallel_mode == "row"
        self.delay(delay_wgrad_compute, ub_bulk_wgrad)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        tokens = x.reshape(-1, x.shape[-1])
        y = self._multiply(tokens, [len(tokens)], is_first_microbatch)
        y = y.view(*x.shape[:-1], y.shape[-1])
        return (y, self.bias if self.use_bias else None) if self.return_bias else y


class LayerNormLinear(Linear):
    def __init__(self, in_features: int, out_features: int, delay_wgrad_compute: bool = False, **options: Any) -> None:
        super().__init__(in_features, out_features, **options)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features, dtype=options.get("params_dtype")))
        self.delay(delay_wgrad_compute)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        normal = torch.nn.functional.layer_norm(x, x.shape[-1:], self.layer_norm_weight)
        return super().forward(normal, is_first_microbatch)


class GroupedLinear(TransformerEngineBaseModule):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        fuse_wgrad_accumulation: bool = False,
        bias: bool = True,
        params_dtype: Any = None,
        delay_wgrad_compute: bool = False,
    ) -> None:
        names, shape = [str(i) for i in range(num_gemms)], (in_features, out_features)
        super().__init__(names, shape, fuse_wgrad_accumulation, bias, False, params_dtype)
        self.delay(delay_wgrad_compute)

    def forward(self, x: torch.Tensor, m_splits: Sequence[int], is_first_microbatch: bool | None = None) -> Any:
        return self._multiply(x, m_splits, is_first_microbatch)

    @torch.no_grad()
    def backward_dw(self) -> None:
        if not self.wgrad_store.delay_wgrad_compute():
            return
        (_, bias_grads, _), tensor_list = self.wgrad_store.pop()
        self._take(tensor_list[2], bias_grads)


class DataParallel(torch.nn.Module):
    """A fake of megatron-core's class: ``main_grad``, a hook that autograd or the module calls, and ready gradients."""

    def __init__(self, config: Any, ddp_config: Any, module: torch.nn.Module) -> None:
        super().__init__()
        self.module, self.is_last = module, False
        self.ready: list[str] = []
        own = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        for name, parameter in own.items():
            parameter.main_grad = torch.zeros(parameter.shape)  # type: ignore[attr-defined]
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
            hook = self._make_backward_post_hook(parameter)
            if ddp_config.delay_wgrad_compute and getattr(parameter, "skip_backward_post_hook", False):
                owner = module.get_submodule(name.rpartition(".")[0])
                owner.register_wgrad_accumulation_and_reduce_hooks(hook)  # type: ignore[operator]
            else:
                node: Any = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
                node.register_hook(hook)
                parameter.node = node  # type: ignore[attr-defined]

    def _make_backward_post_hook(self, parameter: Any) -> Callable[..., None]:
        (name,) = [name for name, own in self.module.named_parameters() if own is parameter]

        def hook(*unused: Any) -> None:
            assert parameter.grad is not None, "overlap_grad_reduce"
            if not parameter.grad_added_to_main_grad:
                parameter.main_grad.add_(parameter.grad)
            parameter.grad = None
            if self.is_last:
                self.ready.append(name)

        return hook

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.is_last = self.is_last, False
        yield
        self.is_last = before


_PACKAGES = ("module", "ops", "ops.basic")
_PLACES: dict[str, list[type]] = {
    "module._common": [WeightGradStore],
    "module.base": [TransformerEngineBaseModule],
    "module.linear": [Linear],
    "module.layernorm_linear": [LayerNormLinear],
    "module.grouped_linear": [GroupedLinear],
}


@contextmanager
def installed(version: str = VERSION) -> Iterator[None]:
    """Make ``transformer_engine`` importable within this context."""
    from tests.helpers.fused_operations import FusedGroupedLinear  # which has the queue of this module

    places = _PLACES | {"ops.basic.grouped_linear": [FusedGroupedLinear]}
    packages = (
        "transformer_engine",
        "transformer_engine.pytorch",
        *(f"transformer_engine.pytorch.{p}" for p in _PACKAGES),
    )
    names = [*packages, *(f"transformer_engine.pytorch.{place}" for place in places)]
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = module
        for own in places.get(name.removeprefix("transformer_engine.pytorch."), ()):
            own.__module__ = name
            setattr(module, own.__name__.removeprefix("Fused"), own)
    sys.modules["transformer_engine"].__version__ = version  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name, module_before in before.items():
            if module_before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module_before
