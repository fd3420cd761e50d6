"""Run ``pretrain_bert.py`` of the Megatron-LM on the path, which without TransformerEngine fails in an import."""

from __future__ import annotations

import runpy
from pathlib import Path

import megatron.training
from megatron.core.models.bert import bert_layer_specs

bert_layer_specs.bert_layer_with_transformer_engine_spec = bert_layer_specs.bert_layer_local_spec
runpy.run_path(str(Path(megatron.training.__file__).parents[2] / "pretrain_bert.py"), run_name=__name__)
