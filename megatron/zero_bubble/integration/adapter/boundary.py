"""The tensors that cross the boundaries between stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.utils import get_model_type

from megatron.zero_bubble.core.costs.lengths import SequenceShape
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Message, Schedule
from megatron.zero_bubble.core.ir.vocabulary import algorithm_of
from megatron.zero_bubble.engine.runtime.handlers import Channels
from megatron.zero_bubble.engine.runtime.headers import HeaderedChannels
from megatron.zero_bubble.engine.runtime.hosts import Hosts
from megatron.zero_bubble.engine.runtime.packing import (
    PackedChannels,
    StageOutput,
    TensorSpec,
    buffer_of,
    new_buffer,
    of_message,
    producing,
    specs_of,
)
from megatron.zero_bubble.engine.runtime.transport import Transport
from megatron.zero_bubble.integration.adapter.lengths import Lengths
from megatron.zero_bubble.integration.adapter.stage_outputs import DECLARATION, UpstreamShapes, outputs_of, with_rows


@dataclass(frozen=True)
class Boundary:
    """The tensors that stages hand to each other, described per producing stage, whatever rank it is on.

    Attributes:
        hidden: shape of the hidden states of a microbatch before the first layer (sequence shard, microbatch, hidden).
        outputs: of every stage but the last, as far as this rank exchanges them, for whole sequences.
        device: that of the tensors.
        ends: the end of every slice of a sequence, in tokens; a message is as long as its slice.
    """

    hidden: tuple[int, ...]
    outputs: tuple[StageOutput, ...]
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
        schedule: Schedule,
    ) -> Boundary:
        """The boundary with the tensors that the model declares, or else Megatron's own schedule would exchange.

        Args:
            adjust: the job's ``adjust_tensor_shapes_fn``.
            schedule: says which stages there are, and in which slices they run.

        Raises:
            UserError: sequences that cannot be cut into slices, or stages that do not agree on what they exchange.
        """
        if getattr(config, "variable_seq_lengths", False):  # then upstream has no shape, from 0.18 on
            config = copy(config)
            config.variable_seq_lengths = False
        sizes = seq_length, micro_batch_size, decoder_seq_length
        upstream = UpstreamShapes(config, groups, sizes, get_model_type(chunk), schedule.num_stages)
        outputs = outputs_of(upstream, schedule.placement.stages_of(groups.pp.rank()), adjust, chunk)
        _check_several([len(output) for output in outputs], config, schedule)
        if algorithm_of(schedule) is not None:
            outputs = with_rows(outputs, upstream.hidden, config, groups, schedule.num_stages)
        length = seq_length if decoder_seq_length is None else decoder_seq_length
        # Sequence parallelism divides every slice among the tensor-parallel ranks.
        slices, parts = schedule.slices, groups.tp.size() if config.sequence_parallel else 1
        ends = slices.in_tokens(length, parts) if len(slices) > 1 else ()
        return cls(upstream.hidden, outputs, device, ends or (length,))

    def new_buffer(self, message: Message) -> torch.Tensor | None:
        """An uninitialized buffer for a message; see ``packing``."""
        return new_buffer(self.specs(message), self.is_packed(message), self.device)

    def channels(self, transport: Transport, _hosts: Hosts | None) -> Channels:
        """What moves the messages while a plan runs.

        Args:
            _hosts: those of the pipeline, if the lengths of microbatches differ.
        """
        return PackedChannels(transport, self.packed) if self.has_packed else transport

    def checked(self, transport: Transport, hosts: Hosts | None) -> Channels:
        """``channels`` that refuse other tensors than described, for which no receive is posted."""
        return CheckedChannels(self.channels(transport, hosts), self.expected, _UNDESCRIBED)

    def expected(self, message: Message, _sent: StageOutput) -> Sequence[StageOutput]:
        """What may be sent: the tensors described, or a buffer for several that no rank reads, because all stop."""
        specs = self.specs(message)
        return (specs, (buffer_of(specs),)) if self.is_packed(message) else (specs,)

    def is_packed(self, message: Message) -> bool:
        return len(self.outputs[producing(message)]) > 1

    @property
    def has_packed(self) -> bool:
        """Whether any stage hands on several tensors."""
        return any(len(output) > 1 for output in self.outputs)

    def packed(self, message: Message) -> StageOutput | None:
        """The tensors of a message that carries several; None for others."""
        return self.specs(message) if self.is_packed(message) else None

    def specs(self, message: Message) -> StageOutput:
        """The tensors of a message; a gradient has those of the stage output that it belongs to."""
        specs, slice_ = of_message(self.outputs[producing(message)], message), message.producer.slice
        if len(self.ends) == 1:
            return specs
        tokens = self.ends[slice_] - (self.ends[slice_ - 1] if slice_ else 0)
        return tuple(TensorSpec((shape[0] * tokens // self.ends[-1], *shape[1:]), dtype) for shape, dtype in specs)


def _check_several(tensors: Sequence[int], config: Any, schedule: Schedule) -> None:
    """Raise UserError if Megatron expects one tensor where stages hand on several; ``tensors`` counts them."""
    if max(tensors, default=1) == 1:
        return
    if schedule.overlaps:
        raise UserError(
            "in schedules with pairs, every stage must hand on one tensor, because megatron-core's plans of layers "
            f"take one; got {schedule.name} for a model whose stages hand on {tensors}; give a schedule without pairs"
        )
    options = {name: getattr(config, name, None) for name in ("num_moe_experts", "mtp_num_layers")}
    if given := [f"{name}={value}" for name, value in options.items() if value is not None]:
        raise UserError(
            "with experts or multi-token prediction, every stage must hand on one tensor, because megatron-core scales "
            f"their losses on the device of this tensor; got {' and '.join(given)} for a model whose stages hand on "
            f"{tensors}; concatenate the tensors, or leave out the option"
        )


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

    def specs(self, message: Message) -> StageOutput:
        """See ``Boundary``."""
        return self.microbatches[message.producer.microbatch].specs(message)

    def channels(self, transport: Transport, hosts: Hosts | None) -> Channels:
        """See ``Boundary``; whoever gave the shapes may have erred in any microbatch."""
        return CheckedChannels(super().channels(transport, hosts), self.expected, _OF_MICROBATCH)

    checked = channels


@dataclass(frozen=True)
class HeaderedBoundary(Boundary):
    """The boundary of microbatches whose shapes only their senders know; its own shapes mean nothing."""

    def new_buffer(self, message: Message) -> None:
        """None: the channels make the buffers."""

    def channels(self, transport: Transport, hosts: Hosts | None) -> Channels:
        assert hosts is not None, "microbatches of different lengths have hosts"
        return HeaderedChannels(transport, hosts, self._dtypes, self._new)

    def expected(self, message: Message, sent: StageOutput) -> Sequence[StageOutput]:
        """See ``Boundary``; the shapes are whatever the header says."""
        specs = self.specs(message)
        if len(sent) != len(specs):
            return (specs,)
        return (tuple(TensorSpec(own.shape, spec.dtype) for own, spec in zip(sent, specs, strict=True)),)

    def _dtypes(self, stage: int) -> tuple[torch.dtype, ...]:
        return tuple(each.dtype for each in self.outputs[stage])

    def _new(self, message: Message, specs: StageOutput) -> torch.Tensor:
        return new_buffer(specs, self.is_packed(message), self.device)


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

    def make(self, lengths: Lengths, schedule: Schedule) -> Boundary:
        """The boundary for the stages and slices of a schedule.

        Raises:
            UserError: see ``Boundary.of`` and ``ShapedBoundary.of_shapes``.
        """
        more: tuple[Any, ...] = self.adjust, self.chunk, self.device, schedule
        if lengths.shapes is not None:
            return ShapedBoundary.of_shapes(lengths.shapes, self.config, self.groups, *more)
        kind = HeaderedBoundary if lengths.need_headers else Boundary
        return kind.of(self.config, self.groups, *self.equal, *more)


class CheckedChannels:
    """``channels``, for stage outputs that must be as described, because receives are posted for these.

    Args:
        expected: returns what may be sent, the described first, from a message and what is sent.
        rule: where the shapes are from, and what to do about others.
    """

    def __init__(
        self,
        channels: Channels,
        expected: Callable[[Message, StageOutput], Sequence[StageOutput]],
        rule: tuple[str, str],
    ) -> None:
        self._channels, self._expected, self._rule = channels, expected, rule
        self.post, self.settle = channels.post, channels.settle

    def send(self, message: Message, value: Any) -> None:
        """See ``Channels``; None says that all ranks stop.

        Raises:
            UserError: other tensors.
        """
        if value is not None:
            self._check(message, specs_of(value))
        self._channels.send(message, value)

    def _check(self, message: Message, sent: StageOutput) -> None:
        expected = self._expected(message, sent)
        if sent not in expected:
            shown, wanted = (" and ".join(map(str, each)) for each in (sent, expected[0]))
            rule, remedy = self._rule
            raise UserError(
                f"the output of a stage must have the shape {rule}, because receives are posted for it; got {shown} "
                f"from {message.producer} in place of {wanted} (tokens, sequences, hidden size); {remedy}"
            )


_OF_MICROBATCH = "given for its microbatch", "give the padded lengths that the model gets"
_UNDESCRIBED = (
    "that its model declares, or else Megatron gives",
    f"declare it by a method {DECLARATION} of the model, or train without a zero-bubble schedule",
)
