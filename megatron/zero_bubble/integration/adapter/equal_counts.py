"""Refuses replicas with different numbers of microbatches where gradients would be wrong, or ranks would hang."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from megatron.core import parallel_state

from megatron.zero_bubble.integration.adapter.part import Call, Part
from megatron.zero_bubble.integration.adapter.replicas import ReplicaComparison, Together


class EqualCounts(Part):
    """Compares the numbers of microbatches of replicas, in the calls of models that need equally many.

    Only calls with microbatches of different lengths are compared: in all others, Megatron's loops give every replica
    equally many.

    Args:
        timeout: how long a replica may take to begin the same iteration; None for the job's.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._timeout = timeout
        self._comparison: ReplicaComparison | None = None

    def begin(self, call: Call) -> None:
        """See ``Part``.

        Raises:
            UserError: the replicas have different numbers, or only some of them evaluate.
            PeerError: a replica died.
        """
        step = call.step
        together = together_in(step.config, step.forward_only)
        if together is None or not call.lengths.differ or call.groups.dp_cp.size() == call.groups.cp.size():
            return
        replicas = call.groups.dp_cp
        if together == SHARING_EXPERTS:
            replicas = parallel_state.get_expert_tensor_and_model_parallel_group()
        if self._comparison is None or self._comparison.replicas is not replicas:
            self.close()
            self._comparison = ReplicaComparison(replicas, self._timeout)
        self._comparison.start(step.num_microbatches, step.forward_only)
        self._comparison.check(together)

    def close(self) -> None:
        if self._comparison is not None:
            self._comparison.close()
            self._comparison = None


SHARING_EXPERTS = Together(
    "data-parallel replicas that share experts",
    "they exchange tokens in every layer",
    "train with expert_model_parallel_size=1",
)
"""These are the replicas of one expert-parallel group; those of different groups may run different numbers."""


def together_in(config: Any, forward_only: bool) -> Together | None:
    """Why the replicas of a model must run equally many microbatches; None if they need not.

    With a loss per token, Megatron weights auxiliary losses by tokens too, so it does not matter which replica has a
    microbatch. Without, it divides those of every replica by the replica's own number of microbatches.
    """
    if not forward_only and (of_losses := _by_losses(config)) is not None:
        return of_losses
    return SHARING_EXPERTS if getattr(config, "num_moe_experts", None) and _ranks_of_expert(config) > 1 else None


def _ranks_of_expert(config: Any) -> int:
    """The ranks that have one copy of the experts together."""
    tensor = getattr(config, "expert_tensor_parallel_size", None) or 1
    return int(getattr(config, "expert_model_parallel_size", 1) * tensor)


def _by_losses(config: Any) -> Together | None:
    losses = _of_experts(config)
    if "global_aux_loss" in losses:
        return Together(
            "data-parallel replicas with global_aux_loss",
            "they sum it in every microbatch",
            "take the auxiliary loss aux_loss",
        )
    if getattr(config, "mtp_num_layers", None):
        losses.append("multi-token prediction")
    if config.calculate_per_token_loss or not losses:
        return None
    return Together(
        f"data-parallel replicas with auxiliary losses ({', '.join(losses)})",
        "each divides these losses by its own number",
        "set calculate_per_token_loss=True, with which every token counts alike",
    )


def _of_experts(config: Any) -> list[str]:
    """The auxiliary losses of experts that have a weight."""
    if getattr(config, "num_moe_experts", None) is None:
        return []
    kinds, weights = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if not isinstance(kinds, (list, tuple)):
        kinds, weights = [kinds], [weights]
    found = [kind for kind, weight in zip(kinds, weights, strict=True) if kind.endswith("aux_loss") and weight]
    return [*found, *(["z loss"] if config.moe_z_loss_coeff else [])]
