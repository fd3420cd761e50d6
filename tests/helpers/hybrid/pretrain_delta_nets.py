"""Run ``pretrain_gpt.py`` of the Megatron-LM on the path with gated delta nets, which it builds for
TransformerEngine only: this has its local classes in the same places.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import megatron.training
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec


class Local(LocalSpecProvider):
    """Local layers; norms are layers of their own."""

    def column_parallel_layer_norm_linear(self) -> Any:
        return self.column_parallel_linear()


def _attention(config: Any, backend: Any) -> Any:
    layer = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)
    return _with_norm(layer.submodules.self_attention)


def _with_norm(spec: Any) -> Any:
    spec.metainfo["fuse_input_layernorm"] = False
    return spec


delta_nets = specs.get_gated_delta_net_module_spec
specs.get_gated_delta_net_module_spec = lambda config, backend: _with_norm(delta_nets(config, backend))
specs._get_self_attention_module_spec = _attention
specs._get_backend_spec_provider = lambda config: Local()
runpy.run_path(str(Path(megatron.training.__file__).parents[2] / "pretrain_gpt.py"), run_name=__name__)
