"""The tensors that cross the boundaries between stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_type

from megatron.zero_bubble.core.costs.lengths import SequenceShape
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import WHOLE, Message, Slices
from megatron.zero_bubble.engine.runtime.handlers import Channels
from megatron.zero_bubble.engine.runtime.headers import HeaderedChannels
from megatron.zero_bubble.engine.runtime.hosts import Hosts
from megatron.zero_bubble.engine.runtime.transport import Transport
from megatron.zero_bubble.integration.adapter.lengths import Lengths
from megatron.zero_bubble.integration.adapter.placement import group_as
from megatron.zero_bubble.integration.adapter.versions import supported_kwargs


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
            UserError: sequences that cannot be cut into ``slices``, or stages that send different shapes.
        """
        if getattr(config, "variable_seq_lengths", False):  # then upstream has no shape, from 0.18 on
            config = copy(config)
            config.variable_seq_lengths = False
        sizes = seq_length, micro_batch_size, decoder_seq_length
        received = sent = _shape_of_messages(config, groups, sizes, get_model_type(chunk))
        if adjust is not None:
            received, sent = adjust(received, sent)
        length = seq_length if decoder_seq_length is None else decoder_seq_length
        # Sequence parallelism divides every slice among the tensor-parallel ranks.
        ends = slices.in_tokens(length, groups.tp.size() if config.sequence_parallel else 1) if len(slices) > 1 else ()
        sequences = _sequences_after_stages(config)
        return cls(received[0], sent[0], sequences, config.pipeline_dtype, device, ends or (length,))

    def new(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=self.dtype, device=self.device)

    def new_buffer(self, message: Message) -> torch.Tensor | None:
        return self.new(self.shape(message))

    def channels(self, transport: Transport, _hosts: Hosts | None) -> Channels:
        """What moves the messages while a plan runs.

        Args:
            _hosts: those of the pipeline, if the lengths of microbatches differ.
        """
        return transport

    def shape(self, message: Message) -> tuple[int, ...]:
        """The shape of a message; a gradient has that of the stage output that it belongs to."""
        shape = self.activation if message.is_activation else self.gradient
        stage = message.producer.stage - (not message.is_activation)
        times = self.num_sequences[stage] if stage < len(self.num_sequences) else 1
        slice_ = message.producer.slice
        tokens = self.ends[slice_] - (self.ends[slice_ - 1] if slice_ else 0)
        length = times * shape[0] * tokens // self.ends[-1]
        return length, *shape[1:]


@dataclass(frozen=True)
class ShapedBoundary(Boundary):
    """The boundary of microbatches of different shapes; the other fields are those of the last one.

    Attributes:
        microbatches: the boundary of each microbatch.
    """

    microbatches: tuple[Boundary, ...] = ()

    @classmethod
    def of_shapes(cls, shapes: Sequence[SequenceShape], config: Any, groups: Any, *more: Any) -> ShapedBoundary:
        """Make the boundaries; the other arguments are those of ``Boundary.of``.

        Raises:
            UserError: also for tokens that cannot be divided over the ranks.
        """
        parts = groups.cp.size() * (groups.tp.size() if config.sequence_parallel else 1)
        for number, shape in enumerate(shapes):
            if shape.tokens % parts:
                raise UserError(
                    "the tokens of a microbatch must be a multiple of the ranks over which they are divided, by "
                    f"context parallelism and sequence parallelism: {parts}; got {shape.tokens} for microbatch "
                    f"{number}; pad its sequences, and give their padded length"
                )
        by_shape = {shape: Boundary.of(config, groups, shape.tokens, shape.sequences, None, *more) for shape in shapes}
        return cls(**vars(by_shape[shapes[-1]]), microbatches=tuple(by_shape[shape] for shape in shapes))

    def shape(self, message: Message) -> tuple[int, ...]:
        """See ``Boundary``."""
        return self.microbatches[message.producer.microbatch].shape(message)

    def channels(self, transport: Transport, _hosts: Hosts | None) -> Channels:
        return _ShapedChannels(transport, self.shape)


@dataclass(frozen=True)
class HeaderedBoundary(Boundary):
    """The boundary of microbatches whose shapes only their senders know; its own shapes mean nothing."""

    def new_buffer(self, message: Message) -> None:
        """None: the channels make the buffers."""

    def channels(self, transport: Transport, hosts: Hosts | None) -> Channels:
        assert hosts is not None, "microbatches of different lengths have hosts"
        return HeaderedChannels(transport, hosts, self.new)


@dataclass(frozen=True)
class BoundaryMaker:
    """Makes the boundary of a call, when all ranks know what any of them knows of the lengths of its microbatches.

    Attributes:
        equal: ``seq_length``, ``micro_batch_size`` and ``decoder_seq_length``.
        config, groups, adjust, chunk, device: see ``Boundary.of``.
    """

    equal: tuple[int, int, int | None]
    config: Any
    groups: Any
    adjust: Callable[..., Any] | None
    chunk: torch.nn.Module
    device: torch.device

    def make(self, lengths: Lengths, slices: Slices) -> Boundary:
        """The boundary for the slices of a schedule.

        Raises:
            UserError: see ``Boundary.of`` and ``ShapedBoundary.of_shapes``.
        """
        more: tuple[Any, ...] = self.adjust, self.chunk, self.device, slices
        if lengths.shapes is not None:
            return ShapedBoundary.of_shapes(lengths.shapes, self.config, self.groups, *more)
        kind = HeaderedBoundary if lengths.need_headers else Boundary
        return kind.of(self.config, self.groups, *self.equal, *more)


class _ShapedChannels:
    """``transport``, for activations that must have the shapes given for them, because receives are posted for these.

    Args:
        shape: returns that of a message.
    """

    def __init__(self, transport: Transport, shape: Callable[[Message], tuple[int, ...]]) -> None:
        self._transport, self._shape = transport, shape
        self.post, self.settle = transport.post, transport.settle

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        """See ``Transport``.

        Raises:
            UserError: a tensor of another shape.
        """
        expected = self._shape(message)
        if tensor.shape != expected:
            raise UserError(
                "the output of a stage must have the shape given for its microbatch, because receives are posted for "
                f"it; got {tuple(tensor.shape)} from {message.producer} in place of {expected} (tokens, sequences, "
                "hidden size); give the padded lengths that the model gets"
            )
        self._transport.send(message, tensor)


def _shape_of_messages(
    config: Any, groups: Any, sizes: tuple[int, int, int | None], model_type: Any
) -> Sequence[tuple[int, ...]]:
    """What Megatron's own schedule sends between any two stages: shapes of tensors, the same on all ranks.

    Newer versions are asked as each rank, because their answer may depend on it.
    """
    seq_length, micro_batch_size, decoder_seq_length = sizes
    shapes = {
        tuple(
            schedules.get_tensor_shapes(
                seq_length=seq_length,
                micro_batch_size=micro_batch_size,
                decoder_seq_length=decoder_seq_length,
                config=config,
                **supported_kwargs(
                    schedules.get_tensor_shapes,
                    tp_group=groups.tp,
                    cp_group=groups.cp,
                    pp_group=group_as(groups.pp, rank),
                    is_recv=is_received,
                    rank=groups.pp.rank(),
                    model_type=model_type,
                    encoder_decoder_xattn=False,
                ),
            )
        )
        for rank in range(groups.pp.size())
        for is_received in (True, False)
    }
    if len(shapes) > 1:
        raise UserError(
            "zero-bubble schedules send one tensor of the same shape between all stages; Megatron's own would send "
            f"{' or '.join(str(list(each)) for each in sorted(shapes))} (tokens, sequences, hidden size) in this "
            "model; leave out the option that makes the stages send more, such as hyper-connections, or train without "
            "a zero-bubble schedule"
        )
    return list(shapes.pop())


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
