"""Optimizer steps without passes: every rank has a small layer with random gradients, drawn for each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tests.helpers.parity import _digest

SPIKE = 1e6


class Job:
    """One rank: a layer (none on the ranks ``empty``) in DDP, megatron-core's optimizer and its scheduler.

    Args:
        ahead: whether the optimizer is a ``PostValidatedOptimizer``.
        pipeline: the number of pipeline ranks; the other ranks are replicas.
        together: whether replicas must reach the same decision.
        options: arguments of ``OptimizerConfig``.
    """

    def __init__(
        self,
        rank: int,
        ahead: bool,
        pipeline: int,
        rollback: str = "exact",
        empty: Sequence[int] = (),
        together: bool = False,
        **options: Any,
    ) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig

        from megatron.zero_bubble.engine.optimizer.post_validation import PostValidatedOptimizer
        from megatron.zero_bubble.engine.optimizer.rollback import ROLLBACKS

        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(1, pipeline, create_gloo_process_groups=False)
        config = OptimizerConfig(**{"optimizer": "adam", "lr": 0.1, "min_lr": 0.0, "clip_grad": 100.0, **options})
        layer: torch.nn.Module = torch.nn.Identity()
        if rank not in empty:
            layer = torch.nn.Linear(5, 3)
            for parameter, seed in zip(layer.parameters(), (rank, 1), strict=True):
                parameter.data.normal_(generator=torch.Generator().manual_seed(seed))
        layer = layer.to(torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else torch.float32)
        of_data = DistributedDataParallelConfig(use_distributed_optimizer=config.use_distributed_optimizer)
        of_model = TransformerConfig(num_layers=pipeline, hidden_size=4, num_attention_heads=1)
        self.chunk = DistributedDataParallel(of_model, of_data, layer)
        self.rank = rank
        self.plain = get_megatron_optimizer(config, [self.chunk], use_gloo_process_groups=False)
        self.optimizer: Any = self.plain
        if ahead:
            group = parallel_state.get_pipeline_model_parallel_group()
            replicas = parallel_state.get_data_parallel_group() if together else None
            self.optimizer = PostValidatedOptimizer(self.plain, [self.chunk], group, ROLLBACKS[rollback], replicas)
        self.scheduler = scheduler_of(self.optimizer)

    def gradients(self, step: int, factor: float = 1.0) -> None:
        """Write random gradients, in place of the passes."""
        if self.optimizer is not self.plain:
            self.optimizer.begin_passes()
        generator = torch.Generator().manual_seed(100 * step + self.rank)
        for parameter in self.chunk.parameters():
            parameter.main_grad.copy_(factor * torch.randn(parameter.shape, generator=generator))

    def contents(self) -> list[str]:
        """Return digests of the optimizer's whole state, final or not."""
        found = [_digest(parameter) for parameter in self.chunk.parameters()]
        for part in self.plain.chained_optimizers:
            for group in part.param_groups:
                found.append(f"lr {group['lr'].hex()} wd {group['weight_decay'].hex()}")
                for parameter in group["params"]:
                    states = sorted(part.optimizer.state[parameter].items())
                    found += [_digest(parameter), *(_digest(value) for _, value in states)]
        return found

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.chunk.parameters()]


def scheduler_of(optimizer: Any) -> Any:
    """Return a scheduler with a different learning rate and weight decay for each step."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.01,
        max_lr=0.2,
        min_lr=0.0,
        lr_warmup_steps=4,
        lr_decay_steps=40,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.9,
        wd_incr_steps=40,
        wd_incr_style="linear",
    )


def take_steps(job: Job, spikes: Mapping[int, int], num_steps: int) -> list[list[str]]:
    """Take steps, ahead of validation if the optimizer supports it; the scheduler advances right after each step.

    Args:
        spikes: per step, the rank whose gradients are too large.

    Returns:
        The optimizer's contents after each step, read once they are final.
    """
    ahead = job.optimizer is not job.plain
    seen = []
    for step in range(num_steps):
        job.gradients(step, SPIKE if spikes.get(step) == job.rank else 1.0)
        if ahead:
            job.optimizer.step_ahead()
        else:
            job.optimizer.step()
        job.scheduler.step(1)
        job.optimizer.zero_grad()
        if ahead:  # the next iteration begins
            job.optimizer.before_forwards()
            job.optimizer.validate()
        seen.append(job.contents())
    if ahead:
        job.optimizer.settle()
    return seen
