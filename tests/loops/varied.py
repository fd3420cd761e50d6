"""A loop over microbatches of different lengths, in the way of RL frameworks: it gives ``seq_length=1`` in every call.

Microbatches are dense (sequences padded to the length of their own microbatch) or packed (several documents in one
sequence, which attend to themselves only). Every step evaluates, and trains on another number of microbatches.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.helpers.weights import draw_by_name
from tests.loops.models import PackedAttention, ShardAttention, destroy_groups, named, on_pipeline, packed_params

LAYERS_PER_RANK, HIDDEN, VOCABULARY, LONGEST = 2, 16, 32, 24
ONE_STAGE, TWO_STAGES = None, 2
KINDS = ("dense", "packed")
SCHEDULES = ("zb-h1", "zb-h2", "zb-v", "interleaved-1f1b")
COUNTS = {"interleaved-1f1b": (4, 8)}
ANY_COUNTS = (5, 3, 6)
TELLS = ("nobody", "all", "first")
STAGES = {"interleaved-1f1b": TWO_STAGES, "zb-v": TWO_STAGES, "v-half": TWO_STAGES}


class Loop(NamedTuple):
    """What a loop trains.

    Attributes:
        kind: ``dense`` or ``packed``.
        counts: the number of microbatches of each step.
        tells: who gives the shapes: ``all`` ranks, the ``first``, or nobody, so that messages have headers.
        tensor: tensor-parallel ranks, with sequence parallelism; lengths are multiples of their number.
        model: ``plain``, or with ``experts``, or that makes ``predictions`` of the token after the next.
        experts: ranks over which experts are divided, which are data-parallel otherwise.
        context: ranks that take a part of each sequence, which attends to itself only.
    """

    kind: str
    counts: tuple[int, ...]
    tells: str = "nobody"
    tensor: int = 1
    model: str = "plain"
    experts: int = 1
    context: int = 1

    @property
    def pipeline(self) -> int:
        """The number of pipeline ranks in a job of all ranks."""
        return dist.get_world_size() // (self.tensor * self.experts * self.context)


class Outcome(NamedTuple):
    """What one rank has after every step: reports of evaluation and training, and the bits of gradients."""

    scores: list[list[str]]
    losses: list[list[str]]
    gradients: list[dict[str, str]]


MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "experts": {
        "num_moe_experts": 4,
        "moe_aux_loss_coeff": 0.1,
        "moe_z_loss_coeff": 0.01,
        "moe_router_topk": 2,
        "add_bias_linear": False,  # megatron-core adds it in place, to what may be a view
    },
    "predictions": {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.5},
}


def build(
    num_ranks: int,
    virtual_size: int | None,
    kind: str,
    model: str = "plain",
    options: Mapping[str, Any] = MappingProxyType({}),
    **of_ddp: Any,
) -> list[Any]:
    """The chunks of this rank, whose weights depend only on their names in the whole model.

    Args:
        options: those of Megatron's ``TransformerConfig``.
        of_ddp: those of its ``DistributedDataParallelConfig``.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer import TransformerConfig

    import megatron.zero_bubble

    config = TransformerConfig(
        num_layers=LAYERS_PER_RANK * num_ranks,
        num_attention_heads=2,
        **on_pipeline(num_ranks, virtual_size),
        **{
            "hidden_size": HIDDEN,
            "calculate_per_token_loss": True,
            "moe_token_dispatcher_type": "alltoall",  # Megatron asks for it with the next one, also without experts
            "variable_seq_lengths": True,
            **MODELS[model],
            **options,
        },
    )
    config.finalize_model_grads_func = finalize_model_grads

    def make_chunk(**stage: Any) -> Any:
        spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts)
        if kind == "packed" or config.context_parallel_size > 1:
            attention = PackedAttention if kind == "packed" else ShardAttention
            spec.submodules.self_attention.submodules.core_attention = attention
        if config.mtp_num_layers:
            more = {"vp_stage": stage["vp_stage"]} if "vp_stage" in stage else {}
            stage["mtp_block_spec"] = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, **more)
        positions = "rope" if config.context_parallel_size == 1 else "learned_absolute"
        chunk = GPTModel(config, spec, VOCABULARY, 4 * LONGEST, position_embedding_type=positions, **stage)
        draw_by_name(named(chunk))
        return chunk.cuda()

    chunks = megatron.zero_bubble.build_stages(make_chunk)
    return [DistributedDataParallel(config, DistributedDataParallelConfig(**of_ddp), chunk) for chunk in chunks]


def batches(count: int, seed: int, kind: str, multiple: int = 1) -> list[dict[str, Any]]:
    """Microbatches of random lengths, which are multiples of a number."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        number, length = (
            int(torch.randint(low, high, (), generator=generator)) for low, high in ((1, 4), (4, LONGEST))
        )
        length *= multiple
        sizes = (
            [multiple + (length + 5 * place * multiple) % LONGEST // multiple * multiple for place in range(number)]
            if kind == "packed"
            else [length]
        )
        sequences = 1 if kind == "packed" else number
        text = torch.randint(VOCABULARY, (sequences, sum(sizes) + 1), generator=generator)
        made.append({"text": text, "packed": packed_params(sizes) if kind == "packed" else None})
    return made


def passes(chunks: Sequence[Any], data: Sequence[dict[str, Any]], factor: float | None = None, **how: Any) -> list[str]:
    """One call of the forward-backward function; returns the exact losses on the last rank.

    Losses are divided by tokens, in Megatron, or multiplied by ``factor``, here.
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(iterator: Iterator[Any], model: Any) -> Any:
        batch = next(iterator)
        text = batch["text"].cuda()
        more = {} if batch["packed"] is None else {"packed_seq_params": batch["packed"]}
        positions = torch.arange(text.shape[1] - 1, device=text.device).expand(text.shape[0], -1)
        shards, shard = (
            parallel_state.get_context_parallel_world_size(),
            parallel_state.get_context_parallel_rank(),
        )
        tokens, positions, labels = (each.chunk(shards, 1)[shard] for each in (text[:, :-1], positions, text[:, 1:]))
        losses = model(tokens, positions, None, labels=labels, **more)

        def loss(output: torch.Tensor) -> Any:
            total = output.float().sum()
            if factor is not None:
                return total * factor, {"loss": float(total).hex()}
            num_tokens = torch.tensor(output.numel(), dtype=torch.int, device=output.device)
            return total, num_tokens, {"loss": float(total).hex()}

        return losses, loss

    iterators: Any = [iter(data) for _ in chunks]
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(data),
        seq_length=1,
        micro_batch_size=1,
        **how,
    )
    return [report["loss"] for report in reports]


def shapes_of(data: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    """The shapes of microbatches, as a loop gives them."""
    return [(batch["text"].shape[0], batch["text"].shape[1] - 1) for batch in data]


def train(rank: int, schedule: str | None, virtual_size: int | None, loop: Loop) -> Outcome:
    """Train on all ranks of the job under a schedule; under stock Megatron without one."""
    return _train(schedule, virtual_size, loop, {}, {})[0]


def train_wide(
    rank: int, schedule: str | None, virtual_size: int | None, loop: Loop, offload: str
) -> tuple[Outcome, int]:
    """Train with layers so wide that what they save is worth to move, and move it under a schedule; also return the
    peak of host memory in bytes.
    """
    return _train(schedule, virtual_size, loop, {"hidden_size": 4 * HIDDEN}, {"offload": offload})


def train_traced(rank: int, schedule: str, virtual_size: int | None, loop: Loop, folder: str) -> Outcome:
    """Train under a schedule, and write a trace of all iterations."""
    return _train(schedule, virtual_size, loop, {}, {"measure_memory": True}, Path(folder))[0]


def _train(
    schedule: str | None,
    virtual_size: int | None,
    loop: Loop,
    options: Mapping[str, Any],
    chosen: Mapping[str, Any],
    traced: Path | None = None,
) -> tuple[Outcome, int]:
    from megatron.core import parallel_state, tensor_parallel

    import megatron.zero_bubble
    from megatron.zero_bubble.engine.measure.recorder import Recorder
    from megatron.zero_bubble.engine.platforms import select
    from megatron.zero_bubble.integration.adapter.offloading import OffloadPart
    from megatron.zero_bubble.integration.adapter.tracer import Tracer
    from megatron.zero_bubble.integration.patching import apply

    recorder, iterations = Recorder(select("cpu")), itertools.count(1)
    tracer = Tracer(recorder, str(schedule), lambda: next(iterations), lambda _: len(loop.counts))
    destroy_groups()
    pipeline = None
    if schedule is not None:
        config = megatron.zero_bubble.ZeroBubbleConfig(schedule=schedule, fuse_wgrad=False, **chosen)
        pipeline = apply(config, [] if traced is None else [tracer, recorder])
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=loop.tensor,
            pipeline_model_parallel_size=loop.pipeline,
            virtual_pipeline_model_parallel_size=virtual_size,
            expert_model_parallel_size=loop.experts,
            context_parallel_size=loop.context,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(7)
        divided = {
            "tensor_model_parallel_size": loop.tensor,
            "sequence_parallel": loop.tensor > 1,
            "expert_model_parallel_size": loop.experts,
            "context_parallel_size": loop.context,
        }
        chunks = build(loop.pipeline, virtual_size, loop.kind, loop.model, {**divided, **options})
        outcome = _steps(chunks, loop)
        if traced is not None:
            tracer.write(traced, None, pipeline)
        offloading = None if pipeline is None else pipeline.part(OffloadPart)
        return outcome, 0 if offloading is None else offloading.host_peak
    finally:
        megatron.zero_bubble.revert()
        destroy_groups()


def _steps(chunks: Sequence[Any], loop: Loop) -> Outcome:
    from megatron.core import parallel_state

    import megatron.zero_bubble

    is_first = parallel_state.get_pipeline_model_parallel_rank() == 0
    shard = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_expert_model_parallel_rank()
    found = Outcome([], [], [])
    for step, count in enumerate(loop.counts):
        data = batches(count, step, loop.kind, loop.tensor * loop.context)
        knows = loop.tells == "all" or is_first
        given = megatron.zero_bubble.shapes(shapes_of(data) if knows else None, None if loop.tells == "all" else 0)
        with nullcontext() if loop.tells == "nobody" else given:
            found.scores.append(passes(chunks, data, forward_only=True))
            for chunk in chunks:
                chunk.zero_grad_buffer()
            found.losses.append(passes(chunks, data))
        found.gradients.append({f"{name} {shard}": digest for name, digest in _digests(chunks).items()})
        with torch.no_grad():
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter -= 0.01 * parameter.main_grad
    return found


def _digests(chunks: Sequence[Any]) -> dict[str, str]:

    gradients = {name: each.main_grad for chunk in chunks for name, each in named(chunk.module)}
    return {name: hashlib.sha256(each.cpu().numpy().tobytes()).hexdigest()[:16] for name, each in gradients.items()}


def outcomes(rank: int, runs: Sequence[tuple[str | None, int | None, Loop]]) -> list[Outcome]:
    """Train with every schedule and loop, in turn."""
    return [train(rank, *run) for run in runs]


def differences(stock: Sequence[Outcome], ours: Sequence[Outcome]) -> list[str]:
    """What differs between the outcomes of all ranks, one line each; gradients of the last step depend on all steps."""
    found = []
    for name in ("scores", "losses"):
        expected, got = (next(each for of in side if any(each := getattr(of, name))) for side in (stock, ours))
        if expected != got:
            found.append(f"{name}: {got} in place of {expected}")
    for step in range(len(stock[0].gradients)):
        expected, got = ({k: v for of in side for k, v in of.gradients[step].items()} for side in (stock, ours))
        found += [
            f"step {step}: the gradient of {name} differs" for name in expected if got.get(name) != expected[name]
        ]
        found += [f"step {step}: {name} is not in stock" for name in got.keys() - expected.keys()]
    return found


Run = tuple[str | None, int | None, Loop]


def runs_of(schedule: str, kind: str, **of_loop: Any) -> list[Run]:
    """Stock Megatron, and the schedule with everyone who may give the shapes; ``of_loop`` are fields of ``Loop``."""
    counts, stock = COUNTS.get(schedule, ANY_COUNTS), TWO_STAGES if schedule in COUNTS else ONE_STAGE
    ours: list[Run] = [
        (schedule, STAGES.get(schedule, ONE_STAGE), Loop(kind, counts, tells, **of_loop)) for tells in TELLS
    ]
    return [(None, stock, Loop(kind, counts, **of_loop)), *ours]


def compared(rank: int, kind: str, schedule: str) -> list[str]:
    """What differs from stock, on rank 0."""
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, outcomes(rank, runs_of(schedule, kind)))
    expected, *ours = zip(*results, strict=True)
    return [f"{schedule}: {line}" for got in ours for line in differences(expected, got)] if rank == 0 else []
