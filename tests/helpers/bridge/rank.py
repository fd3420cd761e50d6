"""One rank of several runs of Megatron-Bridge's ``pretrain()`` and ``finetune()``, one after the other.

``runs.py`` starts it. The arguments are the checkout of Megatron-Bridge and a JSON file with the runs. Each run trains
the vanilla GPT recipe at toy size, and prints digests of its weights by their names in the whole model.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron.zero_bubble.core.errors import UserError
from tests.helpers.bridge.absent import lora, stand_in

TOY: dict[str, Any] = {
    "model.num_layers": 4,
    "model.hidden_size": 64,
    "model.ffn_hidden_size": 128,
    "model.num_attention_heads": 4,
    "model.seq_length": 32,
    "model.vocab_size": 512,
    "model.pipeline_model_parallel_size": 2,
    "model.share_embeddings_and_output_weights": False,
    "model.hidden_dropout": 0.0,
    "model.attention_dropout": 0.0,
    "model.masked_softmax_fusion": False,
    "model.gradient_accumulation_fusion": False,
    "model.cross_entropy_loss_fusion": False,
    "model.persist_layer_norm": False,
    "model.bias_dropout_fusion": False,
    "model.bias_activation_fusion": False,
    "mixed_precision": None,
    "optimizer.bf16": False,
    "optimizer.use_distributed_optimizer": False,
    "optimizer.lr": 1e-3,
    "optimizer.min_lr": 1e-4,
    "scheduler.lr_warmup_iters": 2,
    "train.train_iters": 4,
    "train.global_batch_size": 6,
    "train.micro_batch_size": 1,
    "validation.eval_interval": 2,
    "validation.eval_iters": 1,
    "dataset.seq_length": 32,
    "dataset.num_workers": 0,
    "dataset.split": "90,8,2",
    "tokenizer.vocab_size": 500,
    "logger.log_interval": 1,
    "logger.tensorboard_dir": None,
    "checkpoint.save": None,
    "checkpoint.save_interval": 2,
    "dist.distributed_backend": "gloo",
    "rerun_state_machine.check_for_nan_in_loss": False,
}


def main() -> None:
    bridge, file = sys.argv[1:]
    stand_in(Path(bridge))
    import megatron.zero_bubble.auto  # noqa: F401, I001
    import torch.distributed

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group("gloo", Path(file).with_name("meeting").as_uri(), rank=rank, world_size=size)
    for run in json.loads(Path(file).read_text()):
        print(f"run {run['name']}", flush=True)
        for name in [name for name in os.environ if name.startswith("ZERO_BUBBLE_")]:
            del os.environ[name]  # which the configuration of the run before has set
        try:
            _train(run, Path(bridge))
        except UserError as error:  # before the run has begun
            print(f"zero-bubble: {error}", flush=True)


def _train(run: dict[str, Any], bridge: Path) -> None:
    import torch
    from megatron.bridge.models.gpt_provider import local_layer_spec
    from megatron.bridge.recipes.gpt import vanilla_gpt_pretrain_config
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.finetune import finetune
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
    from megatron.bridge.training.utils.checkpoint_utils import read_train_state
    from megatron.core.utils import unwrap_model

    class Digests(Callback):
        def on_train_end(self, context: Any) -> None:
            for chunk in context.model:
                _print_digests(unwrap_model(chunk))

    config = vanilla_gpt_pretrain_config()
    config.model.transformer_layer_spec = local_layer_spec
    config.model.pipeline_dtype = config.optimizer.params_dtype = torch.float32
    if run["provider"]:
        config.model = PROVIDERS[run["provider"]](config.model)
    for name, value in {**TOY, **run["settings"]}.items():
        _set(config, name, value)
    if run["from_builder"]:
        config.model = _as_model_config(config.model)
    if run["has_adapters"]:
        config.peft = lora(bridge)(dim=4, alpha=8)
    config.env_vars |= run["variables"]
    read_train_state.cache_clear()  # the run before has changed the state that it read
    (finetune if run["has_adapters"] else pretrain)(config, forward_step, callbacks=[Digests()])


def _set(config: Any, name: str, value: Any) -> None:
    *path, last = name.split(".")
    for each in path:
        config = getattr(config, each)
    setattr(config, last, value)


def _fields_of(provider: Any, kind: Any) -> dict[str, Any]:
    """The fields of a provider that the dataclass ``kind`` has too, unless None."""
    found = {f.name: getattr(provider, f.name, None) for f in fields(kind) if f.init}
    return {name: value for name, value in found.items() if value is not None}


def _latent(provider: Any) -> Any:
    """The provider of latent attention, with local layers."""
    from megatron.bridge.models.mla_provider import MLAModelProvider
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    def layers(config: Any) -> Any:
        return get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts, multi_latent_attention=True, normalization=config.normalization
        )

    found = MLAModelProvider(**_fields_of(provider, MLAModelProvider))
    found.transformer_layer_spec = layers
    return found


def _hybrid(provider: Any) -> Any:
    """The provider of hybrid layers, with local ones and the slow scan."""
    from megatron.bridge.models.hybrid.hybrid_provider import HybridModelProvider

    stack = importlib.import_module("hybrid_layers").stack
    of_mamba = {"mamba_state_dim": 16, "mamba_head_dim": 16, "mamba_num_groups": 2}
    common = _fields_of(provider, HybridModelProvider)
    return HybridModelProvider(**{**common, **of_mamba, "hybrid_stack_spec": stack})


PROVIDERS = {"latent": _latent, "hybrid": _hybrid}


def _as_model_config(provider: Any) -> Any:
    """The ``ModelConfig``, which takes the place of the providers, for the same model."""
    from megatron.bridge.models.gpt.gpt_builder import GPTModelConfig
    from megatron.bridge.models.transformer_config import TransformerConfig

    transformer = TransformerConfig(**_fields_of(provider, TransformerConfig))
    return GPTModelConfig(transformer=transformer, **_fields_of(provider, GPTModelConfig))


def _print_digests(model: Any) -> None:
    import torch

    layers = model.decoder.layers

    def in_whole_model(match: re.Match[str]) -> str:
        return f"layers.{layers[int(match[1])].layer_number}."

    for name, weight in model.named_parameters():
        digest = hashlib.sha256(weight.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        print(f"weights after {re.sub(r'layers[.]([0-9]+)[.]', in_whole_model, name)} {digest}", flush=True)


if __name__ == "__main__":  # not in the processes that write checkpoints
    main()
