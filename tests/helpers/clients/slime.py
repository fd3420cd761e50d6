"""slime's ``MegatronTrainRayActor``: its arguments, model, losses, log-probabilities and training, from ``init`` on.

Of Ray's cluster, this process is one actor: it calls the methods that slime's driver calls, and an object is its own
reference. The samples are not sglang's; slime's ``RolloutManager`` makes the training data of them. slime lets a device
be registered, which is the CPU here, and the specification of layers be given, which is of local ones. Where it pauses
and resumes memory of a GPU, nothing happens. It demands numpy 1, of which it uses only the seed.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.helpers.bridge.absent import stand_in_for
from tests.helpers.clients.models import VOCABULARY, weights_of, write_model
from tests.loops.compare import exact

PROMPTS, SAMPLES, ROLLOUTS = 4, 3, 2
ARGUMENTS = f"""
    --debug-train-only --actor-num-nodes 1 --actor-num-gpus-per-node 2 --num-gpus-per-node 2
    --distributed-backend gloo --pipeline-model-parallel-size 2 --transformer-impl local
    --spec tests.helpers.clients.slime local_layers
    --num-layers 4 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4
    --group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm --norm-epsilon 1e-6
    --use-rotary-position-embeddings --rotary-base 10000 --disable-bias-linear --add-qkv-bias
    --untie-embeddings-and-output-weights --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 8
    --seq-length 64 --max-position-embeddings 128 --attention-dropout 0 --hidden-dropout 0 --attention-backend unfused
    --no-rope-fusion --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm
    --no-bias-swiglu-fusion --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32
    --num-rollout {ROLLOUTS} --rollout-batch-size {PROMPTS} --n-samples-per-prompt {SAMPLES}
    --num-steps-per-rollout 2 --micro-batch-size 1 --data-pad-size-multiplier 8 --rollout-max-response-len 8
    --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.1 --entropy-coef 0.01 --offload-train
    --optimizer adam --lr 1e-3 --lr-decay-style constant --weight-decay 0.1
    --rollout-data-postprocess-path tests.helpers.clients.slime.keep
"""
_COMPUTED = ("log_probs", "ref_log_probs", "advantages", "returns")
_seen: list[Any] = []


def load(_checkout: Path, folder: Path) -> None:
    """Import slime, and write the model."""
    from megatron.zero_bubble.engine.platforms import cpu
    from megatron.zero_bubble.engine.platforms.cpu.megatron_lm import JOB_POINTS

    cpu.install(JOB_POINTS)
    stand_in_for("sglang", "sglang_router", "wandb", "qwen_vl_utils", "pylatexenc")
    memory = SimpleNamespace(pause=_nothing, resume=_nothing, region=_region, disable=_region, _impl=None)
    sys.modules["torch_memory_saver"] = module = ModuleType("torch_memory_saver")
    module.torch_memory_saver = memory  # type: ignore[attr-defined]
    import ray
    import torch
    from slime.utils.accelerator import register_accelerator

    torch._C._host_emptyCache = _nothing
    torch.empty_like = _unpinned(torch.empty_like)
    ray.get = ray.put = lambda each, **_: each
    ray.get_gpu_ids = lambda: [0]
    register_accelerator("cpu", _cpu, lambda: True, communication_backends=("gloo",))
    os.environ["SLIME_ACCELERATOR"] = "cpu"
    from slime.backends.megatron_utils import actor, hf_to_megatron, initialize  # noqa: F401
    from slime.observability import logging_utils
    from slime.ray import rollout  # noqa: F401

    initialize.np = SimpleNamespace(__version__="1.26", random=initialize.np.random)
    logging_utils.log = lambda _args, metrics, **_: _seen.append(_timeless(metrics))
    hf_to_megatron._LOADERS["qwen2"] = _of_fused_layers(hf_to_megatron._LOADERS["qwen2"])
    write_model(folder / f"model-{os.environ['RANK']}")


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    """What makes a tensor, in memory that is not pinned, which needs a GPU."""

    def unpinned(*args: Any, pin_memory: bool = False, **more: Any) -> Any:
        return make(*args, **more)

    return unpinned


def _of_fused_layers(weight_of: Callable[..., Any]) -> Callable[..., Any]:
    """What reads a weight by its name, where the norm of a local layer has that of a layer of TransformerEngine."""
    own, fused = "input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"
    return lambda name, *args: weight_of(name.replace(own, fused), *args)


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _region(**_: Any) -> Any:
    return nullcontext()


def _cpu() -> Any:
    import torch
    from slime.utils.accelerator.base import Accelerator

    class Cpu(Accelerator):
        name, device_type, communication_backend_name = "cpu", "cpu", "gloo"
        set_device = synchronize = current_stream = empty_cache = _nothing

        def is_available(self) -> bool:
            return True

        def device(self, _index: Any = None) -> Any:
            return torch.device("cpu")

        def device_name(self, _index: Any = None) -> str:
            return "cpu"

        def current_device(self) -> str:
            return "cpu"

        def device_count(self) -> int:
            return 1

        def mem_get_info(self, _device: Any = None) -> tuple[int, int]:
            return 0, 0

        def memory_allocated(self, _device: Any = None) -> int:
            return 0

        memory_reserved = memory_allocated

    return Cpu()


def local_layers(_args: Any, config: Any, _vp_stage: int | None) -> Any:
    """The specification that ``--spec`` names."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from tests.loops.models import PackedAttention

    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    return spec


def keep(_args: Any, _rollout: int, data: dict[str, Any]) -> None:
    """Keep what slime has computed of a rollout, on the last pipeline rank, before it trains on it."""
    _seen.append({name: [exact(each) for each in data[name]] for name in _COMPUTED if name in data})


def share(args: Any, rollout: int, data: dict[str, Any]) -> None:
    """The same, for a V, whose loss is on the first rank: it gets what the last one has computed."""
    import torch.distributed as dist
    from megatron.core import mpu

    keep(args, rollout, data)
    found = [{name: data[name] for name in _COMPUTED if name in data}]
    last, group = mpu.get_pipeline_model_parallel_last_rank(), mpu.get_pipeline_model_parallel_group()
    dist.broadcast_object_list(found, last, group)
    data.update(found[0])


def train(run: dict[str, Any], folder: Path) -> tuple[Any, dict[str, str]]:
    """Train on rollouts as slime's driver does; returns what it logs."""
    import torch.distributed as dist
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor
    from slime.ray.rollout import RolloutManager
    from slime.utils.arguments import parse_args

    rank, model = int(os.environ["RANK"]), str(folder / f"model-{os.environ['RANK']}")
    arguments = [*ARGUMENTS.split(), "--hf-checkpoint", model, "--ref-load", model]
    if run["variables"]:
        arguments += ["--custom-megatron-init-path", "megatron.zero_bubble.auto.init"]
    sys.argv = ["train.py", *arguments, *run["settings"].get("arguments", "").split()]
    args = parse_args()
    actor = MegatronTrainRayActor(2, rank, "127.0.0.1", run["port"])
    actor.init(args, "actor", with_ref=True)
    manager: Any = object.__new__(RolloutManager.__ray_metadata__.modified_class)
    manager.args, manager.train_parallel_config = args, actor.train_parallel_config
    manager.custom_reward_post_process_func = manager.custom_convert_samples_to_train_data_func = None
    for number in range(ROLLOUTS):
        data = manager._convert_samples_to_train_data(_samples(number))
        actor.train(number, manager._split_train_data_by_dp(data))
    weights = weights_of({"actor": actor.model})
    dist.barrier()  # the first rank has the store of all
    return _seen, weights


def _samples(seed: int) -> list[Any]:
    """Prompts and responses of different lengths, with rewards and the log-probabilities of the sampler."""
    from slime.utils.types import Sample

    drawn = random.Random(seed)
    samples = []
    for number in range(PROMPTS * SAMPLES):
        prompt, response = drawn.randint(1, 8), drawn.randint(1, 6)
        samples.append(
            Sample(
                group_index=number // SAMPLES,
                index=number,
                tokens=[drawn.randrange(4, VOCABULARY) for _ in range(prompt + response)],
                response_length=response,
                reward=drawn.random(),
                rollout_log_probs=[-drawn.random() for _ in range(response)],
                status=Sample.Status.COMPLETED,
            )
        )
    return samples


def _timeless(metrics: dict[str, Any]) -> dict[str, str]:
    return {name: repr(value) for name, value in metrics.items() if not name.startswith("perf/")}
