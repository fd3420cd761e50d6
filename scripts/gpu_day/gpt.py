"""A GPT on the ranks of one pipeline whose iterations are all passes of a global batch, without optimizer and data."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megatron.zero_bubble.engine.platforms import select
from megatron.zero_bubble.engine.runtime.observer import IterationObserver
from megatron.zero_bubble.integration.adapter.pipeline import Pipeline
from megatron.zero_bubble.integration.patching import apply, revert
from megatron.zero_bubble.planning.job.arguments.checks import check
from megatron.zero_bubble.planning.job.arguments.parser import parse
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig
from pretrain import distributed, model
from pretrain.process import Launch
from pretrain.quiet import quiet

VOCABULARY = 1024


def flags(options: argparse.Namespace) -> list[str]:
    """The flags of a job that trains this model, without its pipeline, its schedule and its number of iterations."""
    length, samples = options.seq_length, options.micro_batch_size * options.num_microbatches
    return (
        f"--num-layers {options.num_layers} --hidden-size {options.hidden_size} --seq-length {length} "
        f"--num-attention-heads {max(1, options.hidden_size // 128)} --max-position-embeddings {length} "
        f"--micro-batch-size {options.micro_batch_size} --global-batch-size {samples} --lr 1e-4 --bf16 --mock-data "
        f"--tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1} --make-vocab-size-divisible-by 8 "
        "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --transformer-impl local "
        f"--zero-bubble-device {options.device}"
    ).split()


class Gpt:
    """The model in bfloat16 on all ranks.

    Args:
        options: the arguments of ``step.add_sizes``, and ``device``.
        schedule: the flags of a schedule, which decides the placement of the stages; by default, there is one stage
            per rank.
        graphs: Megatron's ``cuda_graph_impl``.

    Attributes:
        model_config: megatron-core's configuration of the model.
    """

    def __init__(self, options: argparse.Namespace, schedule: Sequence[str] = (), graphs: str = "none") -> None:
        self._options = options
        self.model_config: Any = None
        launch = Launch.from_environment()
        size = ["--pipeline-model-parallel-size", str(launch.world_size), "--train-iters", "1"]
        self._args = parse([*flags(options), *size, *schedule])
        check(self._args, launch.world_size)
        self._args.cuda_graph_impl = graphs  # also on one rank, where a job has no schedule
        self.platform = select(options.device)
        self._device = self.platform.setup(launch.local_rank)
        with quiet():
            self._build(launch)

    def _build(self, launch: Launch) -> None:
        if not dist.is_initialized():
            distributed.check_backend(self.platform.backend, self.platform, launch)
            distributed.initialize(self._args, launch, self.platform.backend)
        self._take_turn()
        self.model_config = config = model.build_config(self._args, self._device)
        if self._args.run.has_schedule:
            apply(self._args.zero_bubble)
        try:
            self._chunks = model.build_model(self._args, config, VOCABULARY, self._device)
        finally:
            revert()
        model.connect(self._args, self._chunks, model.build_optimizer(self._args, self._chunks))
        shape = (self._options.micro_batch_size, self._options.seq_length + 1)
        self._tokens = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(1)).to(self._device)

    def _take_turn(self) -> None:
        """Set Megatron's number of chunks per rank, which its initialization sets only once, to that of this model."""
        from megatron.core import parallel_state

        parallel_state.set_virtual_pipeline_model_parallel_world_size(self._args.virtual_pipeline_model_parallel_size)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the pipeline."""
        from megatron.core import parallel_state

        return parallel_state.get_pipeline_model_parallel_group()

    def memory(self) -> dict[str, int]:
        """Peaks in bytes: of what tensors took, and of what torch reserved for them, which on the CPU is the same."""
        allocated = self.platform.peak_memory_bytes()
        on_gpu = self._device.type == "cuda"
        return {"allocated": allocated, "reserved": torch.cuda.max_memory_reserved() if on_gpu else allocated}

    def gradients(self) -> Iterator[torch.Tensor]:
        """The weight gradients of the last iteration, as bits in the host's memory."""
        for chunk in self._chunks:
            for parameter in chunk.parameters():
                yield parameter.main_grad.detach().cpu().view(torch.int32)

    def layer_passes_ms(self, rounds: int) -> dict[str, float]:
        """Median times of a forward and of a backward through this rank's transformer layers, without the pipeline."""
        shape = (self._options.seq_length, self._options.micro_batch_size, self._options.hidden_size)
        given = torch.randn(shape, device=self._device, dtype=torch.bfloat16, requires_grad=True)
        times: dict[str, list[float]] = {"forward": [], "backward": []}
        for _ in range(rounds):
            start, hidden = self.platform.mark(), given
            for chunk in self._chunks:
                for layer in chunk.module.module.decoder.layers:
                    hidden = layer(hidden_states=hidden, attention_mask=None)[0]
            between = self.platform.mark()
            hidden.backward(hidden.detach())
            end = self.platform.mark()
            times["forward"].append(self.platform.elapsed_ms(start, between))
            times["backward"].append(self.platform.elapsed_ms(between, end))
        return {kind: median(of) for kind, of in times.items()}

    def iteration(self) -> None:
        """Run all passes of one global batch under the schedule that is enabled, or under Megatron's 1F1B."""
        from megatron.core.pipeline_parallel import get_forward_backward_func, schedules

        self._take_turn()
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        # Megatron runs a single rank without its pipeline, which supports one rank and which our schedules replace.
        alone = self._args.pipeline_model_parallel_size == 1
        run = schedules.forward_backward_pipelining_without_interleaving if alone else get_forward_backward_func()
        run(
            forward_step_func=self._forward_step,
            data_iterator=[None] * len(self._chunks) if len(self._chunks) > 1 else None,
            model=self._chunks if len(self._chunks) > 1 else self._chunks[0],
            num_microbatches=self._options.num_microbatches,
            seq_length=self._options.seq_length,
            micro_batch_size=self._options.micro_batch_size,
        )

    def _forward_step(self, _batches: Any, stage: Any) -> tuple[Any, Callable[..., Any]]:
        tokens = self._tokens
        position_ids = torch.arange(tokens.shape[1] - 1, device=self._device).expand(tokens.shape[0], -1)
        output = stage(tokens[:, :-1], position_ids, None, labels=tokens[:, 1:].contiguous())
        return output, lambda losses: (losses.float().mean(), {"loss": losses.float().mean().detach()})


def under(config: ZeroBubbleConfig, observers: Sequence[IterationObserver] = ()) -> Pipeline:
    """Enable the schedule of ``config`` until ``revert``, and return what runs it."""
    return apply(config, observers, say=lambda _: None)


def leave() -> None:
    """End all process groups, also those in reference cycles."""
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
