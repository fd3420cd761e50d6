"""Which jobs can shard their weights and gradients by units of microbatches."""

from __future__ import annotations

from typing import Any

from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.job.needs import Need

_NEEDS = (
    Need(
        "use_distributed_optimizer",
        True,
        "each replica steps its own shard",
        "give --use-distributed-optimizer",
    ),
    Need(
        "overlap_grad_reduce",
        False,
        "the schedule itself reduces gradients, during the passes",
        "drop --overlap-grad-reduce",
    ),
    Need(
        "overlap_param_gather",
        False,
        "the schedule itself gathers weights, during the passes",
        "drop --overlap-param-gather",
    ),
    Need(
        "save_wgrads_interval",
        None,
        "every replica has only its shard of the gradients",
        "drop --save-wgrads-interval",
    ),
    *(
        Need(
            name,
            None,
            "experts are sharded over other groups, which this version does not support",
            "drop --num-experts",
        )
        for name in ("num_moe_experts", "num_experts")  # in a configuration, and among Megatron-LM's flags
    ),
    Need(
        "num_distributed_optimizer_instances",
        1,
        "this version shards over all replicas",
        "drop --num-distributed-optimizer-instances",
    ),
    Need(
        "context_parallel_size",
        1,
        "this version shards only over replicas with whole sequences",
        "drop --context-parallel-size",
    ),
    Need(
        "fp8",
        None,
        "TransformerEngine keeps whole copies of the weights in FP8",
        "drop --fp8-format",
    ),
    Need(
        "fp4",
        None,
        "TransformerEngine keeps whole copies of the weights in FP4",
        "drop --fp4-format",
    ),
    Need(
        "nccl_ub",
        False,
        "buffers that are registered with NCCL cannot be freed",
        "drop --use-nccl-ub",
    ),
    Need(
        "optimizer_cpu_offload",
        False,
        "the optimizer steps shards where they are",
        "drop --optimizer-cpu-offload",
    ),
    Need(
        "defer_embedding_wgrad_compute",
        False,
        "what it adds to gradients after the passes would not be reduced",
        "drop --defer-embedding-wgrad-compute",
    ),
    Need(
        "mtp_num_layers",
        None,
        "multi-token prediction is not supported in this version",
        "drop --mtp-num-layers",
    ),
)


def check_shards(values: Any) -> None:
    """Reject Megatron options that sharded units do not support.

    Args:
        values: a configuration of megatron-core, or the flags of a job; missing options count as supported.

    Raises:
        UserError: the rule, the value and the remedy.
    """
    for need in _NEEDS:
        value = getattr(values, need.name, need.value)
        if value != need.value and value is not None:
            raise UserError(
                f"sharded units need {need.name}={need.value!r}, because {need.why}; got {value!r}; {need.remedy}"
            )
