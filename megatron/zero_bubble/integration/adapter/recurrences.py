"""Recurrent layers that run slice by slice: Mamba layers and gated delta nets.

Such a layer has a causal convolution over a few tokens, and a recurrence over all of them. megatron-core computes both
by functions that begin at the first token. Their replacements continue from what the slice before has left: its last
inputs of the convolution, and the state after its last token (see ``states``). Elsewhere they call the originals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from megatron.zero_bubble.integration.adapter.states import Place, States
from megatron.zero_bubble.integration.adapter.versions import mamba_kernels

RECURRENT = ("MambaMixer", "GatedDeltaNet")
"""The classes of modules that can continue from a state."""
CHANNELS_FIRST, CHANNELS_LAST = -1, 1
"""The dimension of tokens in the inputs of a convolution."""
_STATE, _INPUTS = "state", "inputs of the convolution"


class Recurrences:
    """Continues convolutions and recurrences in the layer that runs.

    Attributes:
        states: what the slices of sequences have left.
    """

    def __init__(self) -> None:
        self.states = States()
        self._at: Callable[[str], Place] | None = None

    @contextmanager
    def slices_of(self, modules: Sequence[Any], at: Callable[[int, str], Place]) -> Iterator[None]:
        """Context in which modules run slice by slice.

        Args:
            modules: the recurrent modules of a chunk.
            at: the place of a state in the pass that runs, by the number of its module and its name.
        """
        handles = []
        for number, module in enumerate(modules):
            handles.append(module.register_forward_pre_hook(partial(self._enter, partial(at, number))))
            handles.append(module.register_forward_hook(self._exit, always_call=True))
        try:
            with _in_one_function(modules):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, at: Callable[[str], Place], _module: Any, _args: Any) -> None:
        self._at = at

    def _exit(self, _module: Any, _args: Any, _output: Any) -> None:
        self._at = None

    @contextmanager
    def _outside(self) -> Iterator[Callable[[str], Place]]:
        """Context around originals, which may call others that are replaced."""
        at, self._at = self._at, None
        assert at is not None
        try:
            yield at
        finally:
            self._at = at

    def convolve(self, tokens: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of a causal convolution of inputs by weights, the first two arguments.

        Args:
            tokens: the dimension of tokens in the inputs.
        """
        if self._at is None:
            return original(*args, **kwargs)
        named = {name: kwargs.pop(name) for name in ("input", "x", "weight") if name in kwargs}
        (inputs, weight), others = (*args, *named.values())[:2], args[2:]
        with self._outside() as at:
            place, before = at(_INPUTS), weight.shape[-1] - 1
            if place.slice:
                earlier = self.states.begun(place, (inputs, weight))
            else:
                shape = [*inputs.shape]
                shape[tokens] = before
                earlier = inputs.new_zeros(shape)
            inputs = torch.cat((earlier, inputs), tokens)
            found = original(inputs, weight, *others, **kwargs)
            result, *more = found if isinstance(found, tuple) else (found,)
            result = result.narrow(tokens, before, result.shape[tokens] - before)
            if not place.is_last:
                last = inputs.narrow(tokens, inputs.shape[tokens] - before, before).clone()
                result = self.states.leave(place, result, last)
        return (result, *more) if more else result

    def delta_rule(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of the rule of a gated delta net, which returns its output and the state after the last token."""
        if self._at is None:
            return original(*args, **kwargs)
        with self._outside() as at:
            place, inputs = at(_STATE), [value for value in (*args, *kwargs.values()) if torch.is_tensor(value)]
            kwargs["initial_state"] = self.states.begun(place, inputs) if place.slice else None
            output, state = original(*args, **{**kwargs, "output_final_state": not place.is_last})
            return (output if place.is_last else self.states.leave(place, output, state)), None

    def scan(
        self, original: Callable[..., Any], projected: Any, weight: Any, bias: Any, *args: Any, **given: Any
    ) -> Any:
        """In place of the convolution and the scan of a Mamba layer in one function, which takes no state of the first.

        The arguments are those that megatron-core gives to ``mamba_split_conv1d_scan_combined``.
        """
        if self._at is None:
            return original(projected, weight, bias, *args, **given)
        scan, convolution = mamba_kernels()
        step_bias, rates = args
        (channels, width), heads = weight.shape, step_bias.numel()
        size = given["headdim"] or given["D"].shape[-1]
        gate, inputs, steps = projected.split((heads * size, channels, heads), -1)
        inputs, length = inputs.transpose(1, 2), inputs.shape[1]
        if convolution is None:
            of = {"padding": width - 1, "groups": channels}
            inputs = self.convolve(CHANNELS_FIRST, functional.conv1d, inputs, weight.unsqueeze(1), bias, **of)
            inputs = functional.silu(inputs[..., :length])
        else:
            inputs = self.convolve(CHANNELS_FIRST, convolution, inputs, weight, bias, activation=given["activation"])
        x, b, c = inputs.transpose(1, 2).split((heads * size, *((channels - heads * size) // 2,) * 2), -1)
        x, gate = (of_heads.unflatten(-1, (heads, size)).contiguous() for of_heads in (x, gate))
        b, c = (of_groups.unflatten(-1, (given["ngroups"], -1)).contiguous() for of_groups in (b, c))
        precision = {name: given[name] for name in ("state_dtype",) if name in given}
        with self._outside() as at:
            place = at(_STATE)
            output = scan(
                x,
                steps.contiguous(),
                rates,
                b,
                c,
                given["chunk_size"],
                D=given["D"],
                z=gate,
                dt_bias=step_bias,
                dt_softplus=True,
                initial_states=self.states.begun(place, (projected, rates)) if place.slice else None,
                return_final_states=not place.is_last,
                **precision,
            )
            if not place.is_last:
                output = self.states.leave(place, *output)
        return output.flatten(-2)


@contextmanager
def _in_one_function(modules: Sequence[Any]) -> Iterator[None]:
    """Context in which Mamba layers call the function that ``Recurrences.scan`` replaces, whatever the job's option."""
    separate = [module for module in modules if getattr(module, "use_mem_eff_path", True) is False]
    for module in separate:
        module.use_mem_eff_path = True
    try:
        yield
    finally:
        for module in separate:
            module.use_mem_eff_path = False
