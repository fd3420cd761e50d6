"""Bytes of a job's weights, gradients and optimizer states, per parameter, from the flags of its optimizer.

TransformerEngine keeps two copies of a weight in low precision, one per direction of its products, besides the one in
16 bits, unless ``--fp8-param-gather`` or ``--fp4-param-gather`` is given. The precision-aware optimizer stores, of
float32 weights, only what 16-bit ones lack, and its moments in the given dtypes.
"""

from __future__ import annotations

from typing import Any

from megatron.zero_bubble.core.costs.precision import BF16
from megatron.zero_bubble.core.costs.static import ParameterBytes
from megatron.zero_bubble.planning.job.kept import linear_precision

_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1}
"""By the names of Megatron's flags, and by those of torch."""
_ONE_MOMENT = ("sgd", "muon", "dist_muon")


def parameter_bytes(args: Any) -> ParameterBytes:
    """Return the bytes of a parameter of a job on a rank that has all of it, without those in host memory.

    Args:
        args: its checked flags, in our loop, in Megatron-LM or in planning.
    """
    weight = 2 if args.bf16 or args.fp16 else 4
    states = _moments(args) + (_main_weight(args) if weight < 4 else 0)
    return ParameterBytes(weight, _gradient(args), _share_on_gpu(args) * states, _layer_weight(args, weight))


def optimizer_replicas(args: Any) -> tuple[int, int]:
    """The replicas among which ``--use-distributed-optimizer`` divides the optimizer state of a parameter, and of a
    parameter of experts, which has fewer replicas.
    """
    if not args.use_distributed_optimizer:
        return 1, 1
    replicas = args.data_parallel_size * args.context_parallel_size
    experts = args.expert_model_parallel_size * (args.expert_tensor_parallel_size or args.tensor_model_parallel_size)
    of_experts = max(1, replicas * args.tensor_model_parallel_size // experts)
    instances = getattr(args, "num_distributed_optimizer_instances", None) or 1
    return max(1, replicas // instances), max(1, of_experts // instances)


def _share_on_gpu(args: Any) -> float:
    """The share of the optimizer's states that is on the GPU during the passes."""
    if getattr(args, "offload_optimizer_states", False):  # which is back there only for its step
        return 0.0
    is_offloaded = getattr(args, "optimizer_cpu_offload", False)
    return 1.0 - getattr(args, "optimizer_offload_fraction", 1.0) if is_offloaded else 1.0


def _gradient(args: Any) -> int:
    if args.grad_reduce_in_bf16:
        return 2
    in_fp32 = getattr(args, "accumulate_allreduce_grads_in_fp32", False)
    return 4 if in_fp32 else _size(args, "main_grads_dtype")


def _moments(args: Any) -> int:
    if args.optimizer in _ONE_MOMENT:
        return 4
    return _size(args, "exp_avg_dtype") + _size(args, "exp_avg_sq_dtype")


def _main_weight(args: Any) -> int:
    size = _size(args, "main_params_dtype")
    has_remainders = _is_aware(args) and args.bf16 and not _is_gathered_low(args)
    return 2 if has_remainders else size


def _layer_weight(args: Any, weight: int) -> float:
    precision = linear_precision(args)
    if precision == BF16:
        return weight
    return 2 * precision.operand_bytes + (0 if _is_gathered_low(args) else weight)


def _is_gathered_low(args: Any) -> bool:
    return any(getattr(args, name, False) for name in ("fp8_param_gather", "fp4_param_gather"))


def _is_aware(args: Any) -> bool:
    return bool(getattr(args, "use_precision_aware_optimizer", False))


def _size(args: Any, option: str) -> int:
    """Bytes of a dtype of the precision-aware optimizer; without it, all are float32."""
    dtype = getattr(args, option, "fp32") if _is_aware(args) else "fp32"
    return _BYTES[str(dtype).removeprefix("torch.")]
