"""Models whose stages hand on something else than one hidden state per token, and their loop.

Every stage has one linear. The whole model, without a pipeline, is the reference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import megatron.zero_bubble

HIDDEN, TOKENS, SAMPLES, VOCABULARY, MICROBATCHES, STAGES = 16, 8, 2, 32, 6, 4
Declared = list[tuple[tuple[int, ...], torch.dtype]]


def growing(stage: int, _num_stages: int, hidden: tuple[int, ...]) -> Declared:
    """Attention residuals: a stage adds its output to the stack of all before it."""
    return [((*hidden[:2], hidden[2] * (stage + 2)), torch.float32)]


def several(_stage: int, _num_stages: int, hidden: tuple[int, ...]) -> Declared:
    """Hidden states, what an encoder has made of the tokens, the tokens, and something that no later stage reads."""
    encoded = (hidden[0] // 2, *hidden[1:])
    return [(hidden, torch.float32), (encoded, torch.bfloat16), (hidden[:2], torch.int64), ((1,), torch.float32)]


def losses(stage: int, _num_stages: int, hidden: tuple[int, ...]) -> Declared:
    """Stage 1 predicts two more tokens, and stage 2 has their losses."""
    return [(((3 if stage == 1 else 1) * hidden[0], *hidden[1:]), torch.float32)]


KINDS: dict[str, Callable[..., Declared]] = {each.__name__: each for each in (growing, several, losses)}


class WithLoss(torch.autograd.Function):
    """Adds the gradient of a loss where its stage hands on an output."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(loss)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (loss,) = ctx.saved_tensors
        return gradient, torch.ones_like(loss) / MICROBATCHES


def make_stage(config: Any, kind: str, number: int, **ends: Any) -> Any:
    """A stage; its weights depend on its number only."""
    from megatron.core.enums import ModelType
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.module import MegatronModule

    class Stage(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config)
            self.number, self.share_embeddings_and_output_weights = number, False
            self.pre_process, self.post_process, self.vp_stage = (
                ends.get(name) for name in ("pre_process", "post_process", "vp_stage")
            )
            self.received: Any = None
            self.model_type = ModelType.encoder_or_decoder
            self.stage_output = KINDS[kind]
            self.embedding = torch.nn.Parameter(torch.empty(VOCABULARY, HIDDEN)) if number == 0 else None
            self.mix = torch.nn.Parameter(torch.empty(STAGES + 1))
            self.linear = ColumnParallelLinear(
                HIDDEN, HIDDEN, config=config, init_method=lambda weight: weight, bias=False
            )
            _draw(self, number)

        def set_input_tensor(self, received: Sequence[Any]) -> None:
            self.received = received[0] if len(received) == 1 else received

        def forward(self, tokens: torch.Tensor) -> Any:
            read = self.embedding[tokens.t()] if self.embedding is not None else self.received
            return getattr(self, kind)(read, tokens)

        def through(self, hidden: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(hidden)[0] + hidden)

        def growing(self, stack: torch.Tensor, _tokens: torch.Tensor) -> torch.Tensor:
            sources = stack.split(HIDDEN, dim=-1)
            weights = self.mix[: len(sources)].softmax(0)
            added = self.through(sum(weight * source for weight, source in zip(weights, sources, strict=True)))
            return added if number == STAGES - 1 else torch.cat([stack, added], dim=-1)

        def several(self, read: Any, tokens: torch.Tensor) -> Any:
            if number == 0:
                encoded = (read[: TOKENS // 2] * self.mix[0]).bfloat16()
                return self.through(read), encoded, tokens.t().contiguous(), self.mix.sum(0, keepdim=True)
            hidden, encoded, ids, unread = read
            if number > 1:
                hidden = hidden + encoded.float().mean(0, keepdim=True) * (ids > 3).unsqueeze(-1)
            hidden = self.through(hidden)
            return hidden if number == STAGES - 1 else (hidden, encoded, ids, unread)

        def losses(self, hidden: torch.Tensor, _tokens: torch.Tensor) -> torch.Tensor:
            if number == 1:
                first = self.through(hidden)
                second = self.through(first * self.mix[0])
                return torch.cat([self.through(hidden * self.mix[1]), first, second])
            if number == 2:
                main, *others = hidden.chunk(3)
                loss = sum(other.square().mean() for other in others)
                return WithLoss.apply(self.through(main), loss)
            return self.through(hidden)

    return Stage()


def _draw(stage: torch.nn.Module, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for parameter in stage.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / 4


def samples() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    while True:
        yield torch.randint(VOCABULARY, (SAMPLES, TOKENS), generator=generator)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def configuration(num_ranks: int, virtual_size: int | None, **more: Any) -> Any:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=STAGES,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        pipeline_model_parallel_size=num_ranks,
        virtual_pipeline_model_parallel_size=virtual_size,
        pipeline_dtype=torch.float32,
        perform_initialization=False,
        **more,
    )
    config.finalize_model_grads_func = finalize_model_grads
    return config


def whole_gradients(kind: str) -> dict[str, str]:
    """The gradients of the whole model, by stage and name."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    stages = [make_stage(configuration(1, None), kind, number) for number in range(STAGES)]
    data = samples()
    for _ in range(MICROBATCHES):
        tokens = next(data)
        value: Any = None
        for stage in stages:
            stage.received = value
            value = stage(tokens)
        (loss_of(value) / MICROBATCHES).backward()
    return _digests((stage, {name: each.grad for name, each in stage.named_parameters()}) for stage in stages)


def _digests(stages: Any) -> dict[str, str]:
    return {
        f"{stage.number}.{name}": _digest(torch.zeros_like(stage.get_parameter(name)) if grad is None else grad)
        for stage, gradients in stages
        for name, grad in gradients.items()
    }


def _digest(gradient: torch.Tensor) -> str:
    """The same for equal bits, and for both zeros."""
    return hashlib.sha256((gradient.float() + 0.0).numpy().tobytes()).hexdigest()


def gradients(schedule: str, kind: str, num_ranks: int, **more: Any) -> dict[str, str]:
    """The gradients of one iteration on this rank; after an evaluation, and a first iteration that counts for nothing.

    Args:
        more: options of the model.
    """
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.pipeline_parallel import get_forward_backward_func

    virtual_size = None if num_ranks == STAGES else STAGES // num_ranks
    megatron.zero_bubble.apply(megatron.zero_bubble.ZeroBubbleConfig(schedule=schedule, fuse_wgrad=False))
    try:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=num_ranks,
            virtual_pipeline_model_parallel_size=virtual_size,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(7)
        config = configuration(num_ranks, virtual_size, **more)

        def make_chunk(**ends: Any) -> Any:
            rank = parallel_state.get_pipeline_model_parallel_rank()
            return make_stage(config, kind, (ends.get("vp_stage") or 0) * num_ranks + rank, **ends)

        model = [
            DistributedDataParallel(config, DistributedDataParallelConfig(), chunk)
            for chunk in megatron.zero_bubble.build_stages(make_chunk)
        ]

        def forward_step(data: Iterator[torch.Tensor], chunk: Any) -> tuple[Any, Any]:
            return chunk(next(data)), lambda output: (loss_of(output), {"loss": loss_of(output).item()})

        for forward_only in (True, False, False):
            for chunk in model:
                chunk.zero_grad_buffer()
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[samples() for _ in model] if len(model) > 1 else samples(),
                model=model,
                num_microbatches=MICROBATCHES,
                seq_length=TOKENS,
                micro_batch_size=SAMPLES,
                forward_only=forward_only,
            )
        stages = [chunk.module for chunk in model]
        return _digests((stage, {name: each.main_grad for name, each in stage.named_parameters()}) for stage in stages)
    finally:
        megatron.zero_bubble.revert()
