"""Jobs of two ranks and more, with and without CUDA graphs of stages; a stand-in takes the place of the GPU."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.helpers.graphs import StandInPool, stand_in

SEQUENCE, VOCABULARY, MICROBATCH, WARM = 8, 32, 2, 1
KIND = "stage graphs"
"""The name of such a job among those of ``tests.loops.run``."""
OF_VERSION = ({"cuda_graph_impl": "local"}, {"enable_cuda_graph": True})
"""How the configuration of a model asks for graphs: since 0.15, and before."""


@dataclass(frozen=True)
class Row:
    """A job.

    Attributes:
        counts: the microbatches of each iteration.
        options: of the model's configuration.
        replicas: of each pipeline.
        parallel: options of data parallelism; without any, steps are those of plain SGD.
        spikes: with post-validation, the iterations whose step is rejected.
        evaluates: whether each iteration is followed by an evaluation.
        tensor: tensor-parallel ranks.
        vocabulary: the algorithm that divides it over the pipeline, if any.
        follows: the iteration from which on another schedule runs, as a plan of zb-auto does, and its name.
    """

    schedule: str
    ranks: int = 2
    counts: Sequence[int] = (6, 4, 6)
    fused: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    replicas: int = 1
    parallel: dict[str, Any] = field(default_factory=dict)
    spikes: Sequence[int] | None = None
    evaluates: bool = False
    tensor: int = 1
    vocabulary: Any = None
    follows: tuple[int, str] | None = None

    @property
    def num_ranks(self) -> int:
        """Of all pipelines."""
        return self.ranks * self.replicas * self.tensor


def samples(seed: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(VOCABULARY, (MICROBATCH, SEQUENCE + 1), generator=generator)


def forward_step(data: Any, model: Any) -> tuple[torch.Tensor, Any]:
    device = next(model.parameters()).device
    text = next(data).to(device)
    positions = torch.arange(SEQUENCE, device=device).expand(MICROBATCH, -1)
    mask = torch.ones(SEQUENCE, SEQUENCE, device=device).triu(1).bool()[None, None]
    losses = model(text[:, :-1], positions, mask, labels=text[:, 1:])
    return losses, lambda output: (output.mean(), {"loss": output.mean().item().hex()})


def build(row: Row, graphs: bool, wrap: bool = True) -> list[Any]:
    """The chunks of a model on this rank."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    import megatron.zero_bubble

    asks = OF_VERSION[not hasattr(TransformerConfig, "cuda_graph_impl")] if graphs else {}
    config = TransformerConfig(
        num_layers=4 if row.ranks == 2 else 8,
        hidden_size=16,
        num_attention_heads=4,
        pipeline_model_parallel_size=row.ranks,
        virtual_pipeline_model_parallel_size=virtual_size(row),
        tensor_model_parallel_size=row.tensor,
        cuda_graph_warmup_steps=WARM,
        **asks,
        **{
            "pipeline_dtype": torch.bfloat16 if row.options.get("bf16") else torch.float32,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            **row.options,
        },
    )
    config.finalize_model_grads_func = finalize_model_grads

    def make(**stage: Any) -> Any:
        spec = get_gpt_layer_local_spec()
        if config.mtp_num_layers:
            more = {"vp_stage": stage["vp_stage"]} if "vp_stage" in stage else {}
            stage["mtp_block_spec"] = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, **more)
        return GPTModel(config, spec, VOCABULARY, SEQUENCE, **stage).cuda()

    chunks = megatron.zero_bubble.build_stages(make)
    if config.bf16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    if not wrap:
        return chunks
    torch.cuda.synchronize()  # with graphs, megatron-core makes weights on other streams
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=config.bf16, **row.parallel)
    model = [DistributedDataParallel(config, ddp_config, chunk) for chunk in chunks]
    if ddp_config.overlap_grad_reduce:
        each = [chunk.no_sync for chunk in model]
        config.no_sync_func = each if len(each) > 1 else each[0]
    return model


def virtual_size(row: Row) -> int | None:
    from megatron.zero_bubble.integration.adapter.model_stages import ModelStages

    return ModelStages(row.schedule, row.ranks).virtual_size


def passes(model: Sequence[Any], data: Sequence[Any], count: int, forward_only: bool = False) -> list[Any]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=list(data) if len(data) > 1 else data[0],
        model=list(model),
        num_microbatches=count,
        seq_length=SEQUENCE,
        micro_batch_size=MICROBATCH,
        forward_only=forward_only,
    )


def optimizer_of(row: Row, model: Sequence[Any]) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    parallel = model[0].ddp_config
    config = OptimizerConfig(
        optimizer="adam",
        lr=0.01,
        min_lr=0.0,
        clip_grad=0.0 if row.spikes is None else 100.0,
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        overlap_param_gather=parallel.overlap_param_gather,
    )
    return get_megatron_optimizer(config, list(model), use_gloo_process_groups=False)


def steps(row: Row, model: Sequence[Any], seed: int, pipeline: Any) -> list[Any]:
    """Train for ``row.counts``; return the losses."""
    data, losses = [samples(seed) for _ in model], []
    validates = row.spikes is not None
    optimizer = optimizer_of(row, model) if row.parallel or validates else None
    ahead = pipeline.post_validated(optimizer, model) if validates else None
    for step, count in enumerate(row.counts):
        if row.follows is not None:
            follow(pipeline, *row.follows, step)
        for chunk in model:
            chunk.zero_grad_buffer()
        if optimizer is not None:
            optimizer.zero_grad()
        losses.append(passes(model, data, count))
        if step in (row.spikes or ()) and losses[-1]:
            for buffer in (buffer for chunk in model for buffer in chunk.buffers):
                buffer.grad_data.mul_(1e6)
        if ahead is not None:
            ahead.step_ahead(step)
        elif optimizer is not None:
            optimizer.step()
        else:
            with torch.no_grad():
                for parameter in (parameter for chunk in model for parameter in chunk.parameters()):
                    parameter -= 0.5 * parameter.main_grad
        if row.evaluates:
            losses.append(evaluate(model, data))
    if ahead is not None:
        ahead.settle()
        losses.append(sorted(ahead.counts.items()))
    return losses


@torch.no_grad()
def evaluate(model: Sequence[Any], data: Sequence[Any]) -> list[Any]:
    losses = passes([chunk.eval() for chunk in model], data, 2, forward_only=True)
    for chunk in model:
        chunk.train()
    return losses


def follow(pipeline: Any, change: int, name: str, step: int) -> None:
    """Run another schedule from an iteration on, which stays."""
    from megatron.zero_bubble.core.schedules import build as built
    from megatron.zero_bubble.integration.adapter.stage_graphs import StageGraphs

    pipeline.part(StageGraphs)._is_settled = lambda: step >= change
    if step == change:
        assert not any(recorded(pipeline)), "there are no graphs before the last change"
        pipeline._make_schedule = lambda ranks, count: built(name, num_ranks=ranks, num_microbatches=count)


def recorded(pipeline: Any) -> list[int]:
    """The number of slots with graphs, by stage."""
    from megatron.zero_bubble.integration.adapter.stage_graphs import StageGraphs

    return [len(block._recorded) for block in pipeline.part(StageGraphs)._blocks.values()]


def digest(model: Sequence[Any]) -> str:
    weights = (parameter for chunk in model for parameter in chunk.parameters())
    copies = (weight.detach().cpu().contiguous().view(torch.uint8) for weight in weights)
    return hashlib.sha256(b"".join(copy.numpy().tobytes() for copy in copies)).hexdigest()


def train(
    rank: int,
    row: Row,
    graphs: bool,
    pool: Callable[..., StandInPool] = StandInPool,
    edit: Callable[[Any], object] = lambda _: None,
    is_stock: bool = False,
    on_gpu: bool = False,
) -> tuple[Any, ...]:
    """What a job reads, a digest of its weights, and the slots that have graphs; call it on a rank pool.

    Args:
        edit: changes what is replaced while the job runs.
        is_stock: whether Megatron's own schedule runs.
        on_gpu: whether graphs are those of CUDA.
    """
    from megatron.core import parallel_state, tensor_parallel

    import megatron.zero_bubble

    with nullcontext() if on_gpu else stand_in(pool), pytest.MonkeyPatch.context() as patch, ExitStack() as ends:
        edit(patch)
        config = megatron.zero_bubble.ZeroBubbleConfig(
            row.schedule,
            fuse_wgrad=row.fused,
            post_validation=row.spikes is not None,
            vocabulary=row.vocabulary,
        )
        pipeline = None if is_stock else megatron.zero_bubble.apply(config)
        ends.callback(megatron.zero_bubble.revert)
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=row.tensor,
            pipeline_model_parallel_size=row.ranks,
            virtual_pipeline_model_parallel_size=virtual_size(row),
            create_gloo_process_groups=False,
        )
        tensor_parallel.random.initialize_rng_tracker(use_cudagraphable_rng=graphs, force_reset=True)
        tensor_parallel.model_parallel_cuda_manual_seed(7)
        torch.manual_seed(7)
        model = build(row, graphs)
        losses = steps(row, model, 5 + parallel_state.get_data_parallel_rank(), pipeline)
        assert pipeline is None or pipeline.num_pending == 0
        return (losses, digest(model)), [] if pipeline is None else recorded(pipeline)


def compared(rank: int, schedule: str) -> list[str]:
    """What differs with graphs, one line each."""
    (eager, _), (graphed, slots) = (train(rank, Row(schedule), graphs) for graphs in (False, True))
    wrong = {"other losses or weights": eager != graphed, "no graphs": not slots}
    return [f"{schedule}, rank {rank}: {what}" for what, holds in wrong.items() if holds]
