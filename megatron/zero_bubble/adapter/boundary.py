"""The tensors that cross the boundaries between stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_type

from megatron.zero_bubble.adapter.versions import supported_kwargs
from megatron.zero_bubble.costs.lengths import Shape
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.ir import WHOLE, Message, Slices


@dataclass(frozen=True)
class Boundary:
    """Shapes (sequence shard, microbatch, hidden), dtype and device of the tensors that this rank exchanges.

    Attributes:
        activation, gradient: shapes of the tensors that this rank receives, for one sequence per stage output.
        num_sequences: number of sequences concatenated in the output of each stage. It is more than one after
            multi-token prediction layers that are not on the last stage, because the outputs of all depths travel to
            the loss together. Stages beyond the end of the tuple have one sequence.
        ends: the end of every slice of a sequence, in tokens; a message is as long as its slice.
    """

    activation: tuple[int, ...]
    gradient: tuple[int, ...]
    num_sequences: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    ends: tuple[int, ...]

    @classmethod
    def of(
        cls,
        config: Any,
        groups: Any,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None,
        adjust: Callable[..., Any] | None,
        chunk: torch.nn.Module,
        device: torch.device,
        slices: Slices = WHOLE,
    ) -> Boundary:
        """The boundary with the shapes that Megatron's own schedule would exchange.

        Args:
            adjust: the job's ``adjust_tensor_shapes_fn``.

        Raises:
            UserError: sequences that cannot be cut into ``slices``.
        """
        of_version = supported_kwargs(
            schedules.get_tensor_shapes,
            tp_group=groups.tp,
            cp_group=groups.cp,
            rank=groups.pp.rank(),
            model_type=get_model_type(chunk),
            encoder_decoder_xattn=False,
        )
        received, sent = (
            schedules.get_tensor_shapes(
                seq_length=seq_length,
                micro_batch_size=micro_batch_size,
                decoder_seq_length=decoder_seq_length,
                config=config,
                **of_version,
            )
            for _ in range(2)
        )
        if adjust is not None:
            received, sent = adjust(received, sent)
        length = seq_length if decoder_seq_length is None else decoder_seq_length
        # Sequence parallelism divides every slice among the tensor-parallel ranks.
        ends = slices.in_tokens(length, groups.tp.size() if config.sequence_parallel else 1) if len(slices) > 1 else ()
        sequences = _sequences_after_stages(config)
        return cls(received[0], sent[0], sequences, config.pipeline_dtype, device, ends or (length,))

    def new_buffer(self, message: Message) -> torch.Tensor:
        """An uninitialized tensor for ``message``; a gradient has the shape of the stage output that it belongs to."""
        shape = self.activation if message.is_activation else self.gradient
        stage = message.producer.stage - (not message.is_activation)
        times = self.num_sequences[stage] if stage < len(self.num_sequences) else 1
        slice_ = message.producer.slice
        tokens = self.ends[slice_] - (self.ends[slice_ - 1] if slice_ else 0)
        length = times * shape[0] * tokens // self.ends[-1]
        return torch.empty((length, *shape[1:]), dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class ShapedBoundary(Boundary):
    """The boundary of microbatches of different shapes; the other fields are those of the last one.

    Attributes:
        microbatches: the boundary of each microbatch.
    """

    microbatches: tuple[Boundary, ...] = ()

    @classmethod
    def of_shapes(cls, shapes: Sequence[Shape], config: Any, groups: Any, *more: Any) -> ShapedBoundary:
        """Make the boundaries; the other arguments are those of ``Boundary.of``."""
        by_shape = {shape: Boundary.of(config, groups, shape.tokens, shape.sequences, None, *more) for shape in shapes}
        return cls(**vars(by_shape[shapes[-1]]), microbatches=tuple(by_shape[shape] for shape in shapes))

    def new_buffer(self, message: Message) -> torch.Tensor:
        """See ``Boundary``."""
        return self.microbatches[message.producer.microbatch].new_buffer(message)


def make_boundary(
    shapes: Sequence[Shape] | None,
    equal: tuple[int, int, int | None],
    config: Any,
    groups: Any,
    adjust: Callable[..., Any] | None,
    chunk: torch.nn.Module,
    device: torch.device,
) -> Callable[[Slices], Boundary]:
    """Return what makes the boundary for the slices of a schedule; the other arguments are those of ``Boundary.of``.

    Args:
        shapes: of every microbatch, if they differ; otherwise None, and all are ``equal``.
        equal: ``seq_length``, ``micro_batch_size`` and ``decoder_seq_length``.
    """

    def boundary(slices: Slices) -> Boundary:
        if shapes is not None:
            return ShapedBoundary.of_shapes(shapes, config, groups, adjust, chunk, device, slices)
        return Boundary.of(config, groups, *equal, adjust, chunk, device, slices)

    return boundary


def _sequences_after_stages(config: Any) -> tuple[int, ...]:
    """Sequences in the output of each stage, from ``--pipeline-model-parallel-layout``; empty without a layout.

    Without a layout, multi-token prediction is on the last stage.

    Raises:
        UserError: a layout that this version of megatron-core accepts but cannot train.
    """
    layout = getattr(config, "pipeline_model_parallel_layout", None)
    if layout is None:
        return ()
    sequences, counts = 1, []
    for chunk in range(layout.virtual_pipeline_model_parallel_size):
        for rank in range(layout.pipeline_model_parallel_size):
            sequences += [layer.name for layer in layout.layout[rank][chunk]].count("mtp")
            counts.append(sequences)
    if not hasattr(config, "mtp_standalone") and any(count > 1 for count in counts[:-1]):
        raise UserError(
            "multi-token prediction before the last stage needs megatron-core 0.16 or newer; got "
            f"--pipeline-model-parallel-layout {layout}; put every m of the layout into its last stage"
        )
    return tuple(counts)
