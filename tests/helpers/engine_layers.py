"""Layers with linears of a fake TransformerEngine, which take the options of megatron-core's wrappers."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tests.helpers import engine


class Wrapper:
    """Imitates megatron-core's wrappers around TransformerEngine's linears."""

    fused = False
    fp8_layers = False

    def __init__(
        self, input_size: int, output_size: int, *, config: Any, init_method: Any, bias: bool, **rest: Any
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            fuse_wgrad_accumulation=Wrapper.fused,
            bias=bias,
            return_bias=rest["skip_bias_add"],
            params_dtype=config.params_dtype,
        )  # type: ignore[call-arg]
        self.config, self.fp8, self.is_first_microbatch = config, Wrapper.fp8_layers, True
        for name, parameter in self.named_parameters():  # type: ignore[attr-defined]
            init_method(parameter) if name == "weight" else None
            parameter.allreduce = not (rest["is_expert"] and config.expert_model_parallel_size > 1)
        if bias:
            torch.nn.init.zeros_(self.bias)  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        y = super().forward(x, self.is_first_microbatch)  # type: ignore[misc]
        self.is_first_microbatch = False
        return y if isinstance(y, tuple) else (y, None)

    def backward_dw(self) -> None:
        if self.config.delay_wgrad_compute:
            super().backward_dw()  # type: ignore[misc]


class Linear(Wrapper, engine.Linear):  # type: ignore[misc]
    pass


class LayerNormLinear(Wrapper, engine.LayerNormLinear):  # type: ignore[misc]
    pass


def with_engine(spec: Any) -> Any:
    """Replace the linears of a layer's spec; only the wrapped linear of the attention includes its norm."""
    from megatron.core.transformer.identity_op import IdentityOp

    for layer in getattr(spec, "layer_specs", [spec]):
        parts = layer.submodules
        parts.input_layernorm = IdentityOp
        attention, mlp = map(_submodules, (parts.self_attention, parts.mlp))
        attention.linear_qkv, attention.linear_proj = LayerNormLinear, Linear
        experts = getattr(mlp, "experts", None)
        of_mlp = mlp if experts is None else _submodules(experts)
        of_mlp.linear_fc1, of_mlp.linear_fc2 = Linear, Linear
    return spec


def _submodules(part: Any) -> Any:
    """Of a spec, or, since 0.19, of a function that builds the part."""
    return part.keywords["submodules"] if isinstance(part, functools.partial) else part.submodules
