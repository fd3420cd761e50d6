"""ms-swift's ``megatron sft``, with its arguments, data and trainer, from its entry function on.

The models of its bridge, mcore-bridge, have layers of TransformerEngine only: a loader and a bridge are derived that
build megatron-core's local layers and give their norms the names of those. Names of TransformerEngine's layers that are
imported stand for local ones.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from tests.helpers.bridge.absent import absent_module
from tests.helpers.clients.models import VOCABULARY, weights_of, write_model

_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
ARGUMENTS = """
    --model_type qwen2 --template qwen2_5 --torch_dtype bfloat16 --check_model false --use_hf true --ddp_backend gloo
    --split_dataset_ratio 0 --dataloader_num_workers 0 --dataloader_pin_memory false --load_from_cache_file false
    --pipeline_model_parallel_size 2 --micro_batch_size 1 --global_batch_size 6 --train_iters 4 --max_length 64
    --lr 1e-3 --lr_warmup_iters 1 --logging_steps 1 --eval_steps 2 --eval_iters 1 --save_steps 1000
    --masked_softmax_fusion false --bias_dropout_fusion false --bias_activation_fusion false
    --gradient_accumulation_fusion false --cross_entropy_loss_fusion false --add_version false
    --no_save_optim true --no_save_rng true --save_safetensors false --recompute_granularity none
"""


def load(_checkout: Path, folder: Path) -> None:
    """Import ms-swift, and write the model and its data."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_HOME=str(folder / f"cache-{os.environ['RANK']}"))
    _with_local_layers()
    import swift.megatron
    import swift.megatron.pipelines.train.sft
    import swift.megatron.trainers  # noqa: F401

    write_model(_of_rank(folder, "model"))
    _of_rank(folder, "switch").write_text("import megatron.zero_bubble.auto\n")
    drawn = random.Random(3)
    for name, count in (("train", 40), ("valid", 12)):
        with _of_rank(folder, name).open("w") as file:
            for _ in range(count):
                texts = [" ".join(_word(drawn) for _ in range(drawn.randint(1, 12))) for _ in range(2)]
                messages = [
                    {"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)
                ]
                file.write(json.dumps({"messages": messages}) + "\n")


def _word(drawn: random.Random) -> str:
    return f"w{drawn.randrange(VOCABULARY - 4)}"


def _of_rank(folder: Path, name: str) -> Path:
    """A file or folder that this rank writes for itself."""
    suffix = {"model": "", "switch": ".py"}.get(name, ".jsonl")
    return folder / f"{name}_{os.environ['RANK']}{suffix}"


def _with_local_layers() -> None:
    import megatron.core.extensions.transformer_engine as engine
    import peft.tuners.lora  # noqa: F401  (which asks whether TransformerEngine is installed)
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    class Absent(torch.nn.Module):
        """A class that no module is of."""

    class OfLocal(type):
        def __instancecheck__(cls, each: Any) -> bool:
            return isinstance(each, ColumnParallelLinear | RowParallelLinear)

    class Linear(ColumnParallelLinear, metaclass=OfLocal):
        """A linear of one rank, and the class of all linears."""

        def __init__(self, *, parallel_mode: None, skip_weight_param_allocation: bool, **more: Any) -> None:
            super().__init__(**more)
            self.parallel_mode, self.use_bias, self.tp_size = parallel_mode, more["bias"], 1
            self.in_features, self.out_features = self.input_size, self.output_size

    ColumnParallelLinear.parallel_mode, RowParallelLinear.parallel_mode = "column", "row"
    linears = {"TEColumnParallelLinear": ColumnParallelLinear, "TERowParallelLinear": RowParallelLinear}
    linears |= {"TELinear": Linear}
    for name in ("TELayerNormColumnParallelLinear", "TEDotProductAttention", "TEGroupedLinear"):
        setattr(engine, name, type(name, (Absent,), {}))
    for name in ("TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"):
        setattr(engine, name, type(name, (Absent,), {}))
    for name, linear in linears.items():
        setattr(engine, name, linear)
    packages = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.attention")
    sys.modules.update({name: absent_module(name) for name in packages})
    from mcore_bridge.bridge import GPTBridge
    from mcore_bridge.model.register import MODEL_MAPPING, ModelLoader

    for name in packages:
        del sys.modules[name]

    from tests.loops.models import PackedAttention

    class OfLocalLayers(ModelLoader):
        def get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
            specs = []
            for _ in range(get_num_layers_to_build(self.config, vp_stage)):
                spec = get_gpt_layer_local_spec(normalization=self.config.normalization)
                spec.submodules.self_attention.submodules.core_attention = PackedAttention
                specs.append(spec)
            return TransformerBlockSubmodules(specs, layer_norm=specs[0].submodules.input_layernorm)

    class ToLocalLayers(GPTBridge):
        def _set_state_dict(self, module: Any, key: str, *args: Any, **kwargs: Any) -> Any:
            return super()._set_state_dict(module, _NORMS.get(key, key), *args, **kwargs)

    MODEL_MAPPING["gpt"].loader, MODEL_MAPPING["gpt"].bridge_cls = OfLocalLayers, ToLocalLayers


def train(run: dict[str, Any], folder: Path) -> tuple[Any, dict[str, str]]:
    """Fine-tune with two evaluations; returns the lines of its log on the last rank."""
    import torch.distributed as dist
    from swift.megatron.pipelines.train.sft import MegatronSft

    rank, output = int(os.environ["RANK"]), folder / f"output of {run['name']}"
    dist.init_process_group("gloo", f"file://{folder}/{run['name']}", rank=rank, world_size=2)
    arguments = [*ARGUMENTS.split(), "--model", str(_of_rank(folder, "model")), "--output_dir", str(output)]
    arguments += ["--dataset", str(_of_rank(folder, "train")), "--val_dataset", str(_of_rank(folder, "valid"))]
    arguments += ["--megatron_extra_kwargs", json.dumps({"persist_layer_norm": False})]  # which has no CPU kernel
    if run["variables"]:
        arguments += ["--external_plugins", str(_of_rank(folder, "switch"))]
    trainers: list[Any] = []

    class Sft(MegatronSft):
        def prepare_trainer(self) -> Any:
            trainers.append(super().prepare_trainer())
            return trainers[0]

    Sft([*arguments, *run["settings"].get("arguments", "").split()]).main()
    lines = [json.loads(line) for line in (output / "logging.jsonl").read_text().splitlines()]
    timeless = [{name: value for name, value in line.items() if not _depends_on_time(name)} for line in lines]
    return (timeless if rank == 1 else []), weights_of({"model": trainers[0].unwrapped_models})


def _depends_on_time(name: str) -> bool:
    return any(each in name for each in ("time", "speed", "memory", "checkpoint"))
