"""CPU replacements for CUDA functions and classes."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class CudaMeansCpu(TorchFunctionMode):
    """Interprets ``cuda`` as the CPU in every torch call of this thread.

    ``device="cuda"`` (loss scale, gradient norms, token counts), ``.to("cuda")`` and ``.cuda()`` return CPU tensors.
    ``tensor.type()`` returns ``torch.cuda.FloatTensor`` and the like, by which megatron-core's optimizers distinguish
    parameter precisions.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs:
            if names_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": CPU}
        elif func is torch.Tensor.type and len(args) == 1:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = tuple(CPU if names_cuda(argument) else argument for argument in args)
        return func(*args, **(kwargs or {}))


def names_cuda(value: object) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.startswith("cuda")


class NoLinear:
    """A class without instances, for a linear that exists only with TransformerEngine."""


class NoStream:
    """A stream on a device that runs all work synchronously."""

    device = CPU
    cuda_stream = 0

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        pass

    def wait_stream(self, _stream: object) -> None:
        pass

    def wait_event(self, _event: object) -> None:
        pass

    def record_event(self, event: NoEvent | None = None) -> NoEvent:
        return event or NoEvent()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class NoEvent:
    """An event that has always completed, for a device that runs all work synchronously."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        pass

    def record(self, _stream: object = None) -> None:
        pass

    def wait(self, _stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def nothing(*_args: object, **_kwargs: object) -> None:
    """Replacement for functions that have no effect on a CPU."""


def no_range(*_args: object, **_kwargs: object) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def no_stream(*_args: object, **_kwargs: object) -> NoStream:
    return NoStream()


def get_rng_state(*_args: object, **_kwargs: object) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, *_args: object, **_kwargs: object) -> None:
    torch.set_rng_state(new_state)


def manual_seed(seed: int) -> None:
    torch.manual_seed(seed)


def no_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def split_sizes_as_lists(all_to_all_single: Callable[..., Any]) -> Callable[..., Any]:
    def as_list(sizes: Any) -> Any:
        return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes

    def stand_in(
        output: Any,
        input: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return all_to_all_single(
            output, input, as_list(output_split_sizes), as_list(input_split_sizes), *args, **kwargs
        )

    return stand_in


def send_aliases(p2p_ops: Callable[..., Any]) -> Callable[..., Any]:
    def alias(tensor: torch.Tensor | None) -> torch.Tensor | None:
        # A separate tensor with the same storage: gloo's Work keeps it, and so the storage, until it is sent.
        return None if tensor is None else tensor.detach()

    def stand_in(*, tensor_send_prev: Any, tensor_send_next: Any, **kwargs: Any) -> Any:
        return p2p_ops(tensor_send_prev=alias(tensor_send_prev), tensor_send_next=alias(tensor_send_next), **kwargs)

    return stand_in


def mark_sequence_parallel(original: staticmethod[..., Any]) -> staticmethod[..., Any]:
    new = original.__func__

    def stand_in(cls: type, config: Any, hidden_size: int, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return new(cls, config, hidden_size, *args, **kwargs)
        without = copy.copy(config)
        without.sequence_parallel = False
        norm = new(cls, without, hidden_size, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    return staticmethod(stand_in)


def takes_channels(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def stand_in(
        self: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **more: Any
    ) -> None:
        init(self, *args, **more)
        if v_channels is not None:  # the width of the result; the scale of the scores is an argument of its own
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    return stand_in
