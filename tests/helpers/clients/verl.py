"""verl's ``TrainingWorker`` with its Megatron engine: an actor, a reference and a critic, as its controller calls them.

The controller, which is Ray's, is not run: what it sends from the last pipeline rank to all is broadcast here. verl
takes the device for a GPU, whose functions the CPU platform replaces. Its bridge to Hugging Face's weights, mbridge,
builds layers of TransformerEngine only: its class for Qwen is derived, with megatron-core's local layers.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from tests.helpers.clients.models import VOCABULARY, weights_of, write_model
from tests.loops.compare import exact

PROMPT, RESPONSE = 8, 6


def load(_checkout: Path, folder: Path) -> None:
    """Import verl, and write the models."""
    import torch
    import verl.utils.attention_utils
    import verl.utils.device
    import verl.workers.engine_workers
    from mbridge.models.qwen2 import Qwen2Bridge
    from verl.utils import npu_flash_attn_utils as paddings

    verl.utils.device.is_cuda_available = True
    torch.cuda.mem_get_info = lambda *_: (0, 0)  # for its logs
    torch.cuda.get_device_name = lambda *_: "H100"  # for its estimate of a rate
    torch.Tensor.pin_memory = lambda each, *_: each.clone()  # type: ignore[method-assign]  # no memory of the device's
    in_torch = paddings.index_first_axis, paddings.pad_input, paddings.rearrange, paddings.unpad_input
    verl.utils.attention_utils._get_attention_functions = lambda: in_torch  # verl's own, in the place of flash_attn's
    _with_local_layers(Qwen2Bridge)
    write_model(folder / f"model-{_rank()}")


def _rank() -> int:
    return int(os.environ["RANK"])


def _with_local_layers(of_qwen: Any) -> None:
    from mbridge.core import register_model
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from tests.loops.models import PackedAttention

    layer = "model.layers.{layer_number}."

    class OfLocalLayers(of_qwen):
        _OTHER_MAPPING: ClassVar = {"input_layernorm.weight": [f"{layer}input_layernorm.weight"]}
        _MLP_MAPPING: ClassVar = of_qwen._MLP_MAPPING | {
            "pre_mlp_layernorm.weight": [f"{layer}post_attention_layernorm.weight"]
        }

        def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
            self.has_vp_stage = True
            spec = get_gpt_layer_local_spec(normalization="RMSNorm")
            spec.submodules.self_attention.submodules.core_attention = PackedAttention
            return spec

    register_model("qwen2")(OfLocalLayers)


def train(run: dict[str, Any], folder: Path) -> tuple[Any, dict[str, str]]:
    """Two rounds of PPO: log-probabilities and values, then two epochs over mini-batches; returns what verl reports."""
    import torch.distributed as dist
    from verl.workers.config import ActorConfig, CriticConfig, HFModelConfig
    from verl.workers.utils.losses import ppo_loss, value_loss

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    dist.init_process_group("gloo", f"file://{folder}/{run['name']}", rank=_rank(), world_size=2)
    external = "megatron.zero_bubble.auto" if run["variables"] else None
    model = partial(HFModelConfig, path=str(folder / f"model-{_rank()}"), external_lib=external)
    of_values = {"model_config": {"architectures": ["Qwen2ForTokenClassification"]}}
    actor = _worker(run, "language_model", model())
    reference = _worker(run, "language_model", model(), forward_only=True)
    critic = _worker(run, "value_model", of_critic := model(override_config=of_values))
    losses = {"strategy": "megatron", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
    actor.set_loss_fn(partial(ppo_loss, config=ActorConfig(**losses, use_kl_loss=True, entropy_coeff=0.01)))
    critic.set_loss_fn(partial(value_loss, config=CriticConfig(**losses, model_config=of_critic)))
    seen: list[Any] = []
    for number, count in enumerate((8, 6)):
        batch = _rollout(count, number)
        for worker, key, name in (
            (actor, "log_probs", "old_log_probs"),
            (reference, "log_probs", "ref_log_prob"),
            (critic, "values", "values"),
        ):
            batch[name] = _inferred(worker, batch, key)
            seen.append(exact(batch[name]))
        for worker, asks_entropy in ((critic, False), (actor, True)):
            output = worker.train_mini_batch(_without_padding(batch, count, calculate_entropy=asks_entropy))
            seen.append(_metrics(output))
    for worker in (actor, critic):
        worker.to("device")
    return seen, weights_of({"actor": actor.engine.module, "critic": critic.engine.module})


def _worker(run: dict[str, Any], kind: str, model: Any, forward_only: bool = False) -> Any:
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import McoreEngineConfig, McoreOptimizerConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    options = {"gradient_accumulation_fusion": False, "masked_softmax_fusion": False, "persist_layer_norm": False}
    # Without offloading, verl would free the gradients: it takes a field of megatron-core 0.16's buffers for its own.
    offloads = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}
    engine = McoreEngineConfig(
        forward_only=forward_only,
        pipeline_model_parallel_size=2,
        max_token_len_per_gpu=24,
        infer_max_token_len_per_gpu=40,
        **{
            **offloads,
            **run["settings"].get("engine", {}),
            "override_transformer_config": options | run["settings"].get("transformer", {}),
        },
    )
    optimizer = McoreOptimizerConfig(lr=1e-3, clip_grad=run["settings"].get("clip", 1.0), lr_decay_steps=10)
    config = TrainingWorkerConfig(
        model_type=kind,
        model_config=model,
        engine_config=engine,
        optimizer_config=optimizer,
        checkpoint_config=CheckpointConfig(),
    )
    worker = TrainingWorker(config)
    model_parallel_cuda_manual_seed(7)  # verl leaves it out if torch counts no GPU
    worker.reset()
    return worker


def _rollout(count: int, seed: int) -> dict[str, Any]:
    """Prompts and responses of different lengths, padded on both sides, with advantages and returns."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    length = PROMPT + RESPONSE
    prompts = torch.randint(1, PROMPT + 1, (count, 1), generator=generator)
    responses = torch.randint(1, RESPONSE + 1, (count, 1), generator=generator)
    places = torch.arange(length)
    attended = ((places >= PROMPT - prompts) & (places < PROMPT + responses)).long()
    tokens = torch.randint(4, VOCABULARY, (count, length), generator=generator) * attended
    return {
        "input_ids": tokens,
        "attention_mask": attended,
        "position_ids": (attended.cumsum(1) - 1).clamp(min=0),
        "prompts": tokens[:, :PROMPT],
        "responses": tokens[:, PROMPT:],
        "response_mask": attended[:, PROMPT:],
        "advantages": torch.randn((count, RESPONSE), generator=generator),
        "returns": torch.randn((count, RESPONSE), generator=generator),
    }


def _without_padding(batch: dict[str, Any], count: int, **more: Any) -> Any:
    """A batch as verl's trainer sends it to its workers."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    data = left_right_2_no_padding(tu.get_tensordict(dict(batch)))
    tokens = batch["attention_mask"].sum(1).tolist()
    of_training = {"global_batch_size": count, "mini_batch_size": count // 2, "epochs": 2, "seed": 1}
    tu.assign_non_tensor(data, temperature=1.0, global_token_num=tokens, dataloader_kwargs={"shuffle": False})
    tu.assign_non_tensor(data, **of_training, **more)
    return data


def _inferred(worker: Any, batch: dict[str, Any], key: str) -> Any:
    """Log-probabilities or values of a batch on all ranks, which the last one computes."""
    import torch.distributed as dist
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import no_padding_2_padding

    data = _without_padding(batch, len(batch["prompts"]), compute_loss=False)
    output = worker.infer_batch(data)
    found = [None if output is None else no_padding_2_padding(tu.get(output, key), data).float()]
    dist.broadcast_object_list(found, src=1)
    return found[0]


def _metrics(output: Any) -> Any:
    """What a worker reports, without what depends on the time."""
    from verl.utils import tensordict_utils as tu

    if output is None:
        return None
    metrics = tu.get(output, "metrics").items()
    return {name: repr(getattr(value, "values", value)) for name, value in metrics if name != "mfu"}
