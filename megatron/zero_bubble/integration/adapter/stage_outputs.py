"""What every stage of a model hands to the next one: as the model declares it, or as Megatron's own schedule sends it.

A model declares it by a method ``stage_output(stage, num_stages, hidden)``, which returns the shape and the dtype of
every tensor; ``hidden`` is the shape of one hidden state per token on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.engine.runtime.headers import MOST_DIMENSIONS
from megatron.zero_bubble.engine.runtime.packing import StageOutput, TensorSpec
from megatron.zero_bubble.integration.adapter.placement import group_as
from megatron.zero_bubble.integration.adapter.versions import supported_kwargs

DECLARATION = "stage_output"
_Shapes = list[tuple[int, ...]]


@dataclass(frozen=True)
class UpstreamShapes:
    """Megatron's shapes of what it sends, for stages that may be anywhere.

    Attributes:
        sizes: ``seq_length``, ``micro_batch_size`` and ``decoder_seq_length``.
    """

    config: Any
    groups: Any
    sizes: tuple[int, int, int | None]
    model_type: Any
    num_stages: int

    def at(self, stage: int, is_received: bool) -> _Shapes:
        """What a stage receives or sends. Megatron is asked as if every stage had a rank of its own, because its answer
        may depend on the rank; every placement has these stages.
        """
        seq_length, micro_batch_size, decoder_seq_length = self.sizes
        shapes = schedules.get_tensor_shapes(
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=decoder_seq_length,
            config=self.config,
            **supported_kwargs(
                schedules.get_tensor_shapes,
                tp_group=self.groups.tp,
                cp_group=self.groups.cp,
                pp_group=group_as(self.groups.pp, stage, self.num_stages),
                is_recv=is_received,
                rank=self.groups.pp.rank(),
                model_type=self.model_type,
                encoder_decoder_xattn=False,
            ),
        )
        return [tuple(shape) for shape in shapes]

    @cached_property
    def hidden(self) -> tuple[int, ...]:
        """The shape of one hidden state per token, as the embedding makes it."""
        return self.at(0, is_received=True)[0]

    def below(self, stage: int) -> _Shapes:
        """What crosses the boundary below a stage.

        Raises:
            UserError: the stages at its two sides do not agree.
        """
        sent, received = self.at(stage, is_received=False), self.at(stage + 1, is_received=True)
        if sent != received:
            raise UserError(
                f"what a stage sends must be what the next one receives; this model's stage {stage} of "
                f"{self.num_stages} sends {sent} and stage {stage + 1} expects {received} (tokens, sequences, hidden "
                "size); leave out the option that makes stages differ, or train without a zero-bubble schedule"
            )
        return sent


def outputs_of(
    upstream: UpstreamShapes, on_rank: Collection[int], adjust: Callable[..., Any] | None, chunk: torch.nn.Module
) -> tuple[StageOutput, ...]:
    """The outputs of all stages but the last.

    Args:
        on_rank: the stages of this rank, whose exchanges ``adjust`` changes as the job's ``adjust_tensor_shapes_fn``.
        chunk: a chunk of the model.

    Raises:
        UserError: stages that do not agree, or a layout that this version cannot train.
    """
    stages = range(upstream.num_stages - 1)
    if (declared := declaration_of(chunk)) is not None:
        return tuple(_as_specs(stage, declared(stage, upstream.num_stages, upstream.hidden)) for stage in stages)
    shapes = dict(enumerate(map(upstream.below, stages)))
    if adjust is not None:
        shapes |= _adjusted(shapes, on_rank, adjust, upstream.hidden)
    times = (*sequences_after_stages(upstream.config), *(1,) * upstream.num_stages)  # beyond a layout, one
    dtype = upstream.config.pipeline_dtype or torch.get_default_dtype()
    return tuple(
        tuple(TensorSpec((times[stage] * length, *rest), dtype) for length, *rest in shapes[stage]) for stage in stages
    )


def _as_specs(stage: int, declared: Sequence[tuple[Sequence[int], torch.dtype]]) -> StageOutput:
    """What a model declares of a stage, which must fit into a header."""
    specs = tuple(TensorSpec(tuple(shape), dtype) for shape, dtype in declared)
    if not specs or any(len(each.shape) > MOST_DIMENSIONS for each in specs):
        raise UserError(
            f"every stage but the last must hand on one tensor or more, of at most {MOST_DIMENSIONS} dimensions each; "
            f"{DECLARATION} of the model gives {[each.shape for each in specs]} for stage {stage}; reshape them there"
        )
    return specs


def declaration_of(model: Any) -> Callable[..., Sequence[tuple[Sequence[int], torch.dtype]]] | None:
    """The method by which a model, within its wrappers, declares the outputs of its stages; most models have none."""
    while model is not None:
        if hasattr(model, DECLARATION):
            declared: Callable[..., Any] = getattr(model, DECLARATION)
            return declared
        model = getattr(model, "module", None)
    return None


def _adjusted(
    shapes: dict[int, _Shapes], on_rank: Collection[int], adjust: Callable[..., Any], hidden: tuple[int, ...]
) -> dict[int, _Shapes]:
    """What the stages of this rank exchange after ``adjust``, by producing stage."""
    adjusted = {}
    for stage in on_rank:
        received, sent = (list(shapes.get(producer, [hidden])) for producer in (stage - 1, stage))
        adjusted[stage - 1], adjusted[stage] = adjust(received, sent)
    return {producer: each for producer, each in adjusted.items() if producer in shapes}


def _stages_of(layout: Any) -> list[list[str]]:
    """The names of the layers of every stage."""
    chunks = range(layout.virtual_pipeline_model_parallel_size)
    ranks = range(layout.pipeline_model_parallel_size)
    return [[layer.name for layer in layout.layout[rank][chunk]] for chunk in chunks for rank in ranks]


def sequences_after_stages(config: Any) -> tuple[int, ...]:
    """Sequences that are concatenated in the output of each stage, from ``--pipeline-model-parallel-layout``; empty
    without a layout.

    It is more than one after multi-token prediction layers that are not on the last stage, because the outputs of all
    depths travel to their losses together. A stage with losses before the last one takes off as many as it computes.
    Without a layout, multi-token prediction is on the last stage.

    Raises:
        UserError: a layout that this version of megatron-core accepts but cannot train.
    """
    layout = getattr(config, "pipeline_model_parallel_layout", None)
    if layout is None:
        return ()
    sequences, counts = 1, []
    for names in _stages_of(layout):
        sequences += names.count("mtp") - names.count("loss")
        counts.append(sequences)
    if not hasattr(config, "mtp_standalone") and any(count > 1 for count in counts[:-1]):
        raise UserError(
            "multi-token prediction before the last stage needs megatron-core 0.16 or newer; got "
            f"--pipeline-model-parallel-layout {layout}; put every m of the layout into its last stage"
        )
    return tuple(counts)


def stage_of_predictions(config: Any, num_stages: int) -> int | None:
    """The stage with the layers of multi-token prediction; None without them."""
    if not getattr(config, "mtp_num_layers", None):
        return None
    layout = getattr(config, "pipeline_model_parallel_layout", None)
    return num_stages - 1 if layout is None else next(n for n, names in enumerate(_stages_of(layout)) if "mtp" in names)


def looked_up_tokens(hidden: Sequence[int], config: Any, groups: Any) -> int:
    """The tokens per sequence that the passes of a divided vocabulary look up: with multi-token prediction, token 0
    too, with which megatron-core fills the ends of the sequences that it rolls, once per part of a sequence.
    """
    num_parts = groups.tp.size() if config.sequence_parallel else 1
    return (hidden[0] + bool(getattr(config, "mtp_num_layers", None))) * num_parts


def with_rows(
    outputs: tuple[StageOutput, ...], hidden: Sequence[int], config: Any, groups: Any, num_stages: int
) -> tuple[StageOutput, ...]:
    """Outputs of stages whose embedding is divided: up to the stage of multi-token prediction, they also have the rows
    of the tokens, and the tokens.

    Raises:
        UserError: a stage before the predictions hands on several tensors.
    """
    predicting = stage_of_predictions(config, num_stages)
    if predicting is None:
        return outputs
    if any(len(output) > 1 for output in outputs[:predicting]):
        raise UserError(
            "with vocabulary parallelism and multi-token prediction, every stage must hand on one tensor, with which "
            f"rows of the embedding travel; got {[len(output) for output in outputs[:predicting]]}; train with "
            "--zero-bubble-vocabulary-parallel off"
        )
    tokens = TensorSpec((hidden[1], looked_up_tokens(hidden, config, groups)), torch.int64)
    rows = TensorSpec((hidden[0] + 1, *hidden[1:]), config.params_dtype), tokens
    return tuple((*output, *rows) if stage < predicting else output for stage, output in enumerate(outputs))
