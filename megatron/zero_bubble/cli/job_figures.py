"""Costs and memory of a training job: estimated from its flags, or read from the costs file of an earlier run."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.costs.devices import Device
from megatron.zero_bubble.core.costs.estimate import layer_costs
from megatron.zero_bubble.core.costs.model import Model
from megatron.zero_bubble.core.costs.operations import operations
from megatron.zero_bubble.core.costs.precision import BF16
from megatron.zero_bubble.core.costs.predictions import ASSUMED as PREDICTIONS
from megatron.zero_bubble.core.costs.predictions import with_predictions
from megatron.zero_bubble.core.costs.units import parse_bytes
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.costs import CostsFile, read_costs_file
from megatron.zero_bubble.core.formats.facts import differences, listed
from megatron.zero_bubble.core.formats.layout import job_predictions
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.planning.division import Division
from megatron.zero_bubble.planning.figures import HALVED, Figures
from megatron.zero_bubble.planning.job.facts import facts_of
from megatron.zero_bubble.planning.job.model import (
    GPT2_VOCAB_SIZE,
    division_of,
    predicted_layers,
    rank_model,
    unestimated_kinds,
)
from megatron.zero_bubble.planning.job.parameters import optimizer_replicas, parameter_bytes
from megatron.zero_bubble.planning.job.vocab_size import tokenizers_vocab_size
from megatron.zero_bubble.planning.shards import how_held
from megatron.zero_bubble.planning.weights import ModelWeights

_NO_PREDICTIONS = (
    "The costs have no part for multi-token prediction: its time counts as part of the output layer of the last stage; "
    "record the costs under this layout."
)


@dataclass(frozen=True)
class CostsInput:
    """The value of ``--costs``: a path, whose file is read once, because it may be a pipe.

    Attributes:
        path: of the costs file.
    """

    path: str

    def __str__(self) -> str:
        return self.path

    @cached_property
    def file(self) -> CostsFile:
        """The content.

        Raises:
            UserError: for a file that cannot be read or is invalid.
        """
        return read_costs_file(self.path)


def job_figures(
    args: argparse.Namespace,
    layers: tuple[int, ...],
    device: Device,
    costs: CostsInput | None,
) -> Figures:
    """Return costs and memory for checked ``args``, with ``layers`` per stage; see ``Figures`` for their meaning."""
    from megatron.zero_bubble.planning.job.arguments.tokenizer import known_vocab_size

    sizes = args.pipeline_model_parallel_size, args.batch_sizes.final // args.batch_sizes.granule
    others = unestimated_kinds(args)
    estimated, predictions = not others, predicted_layers(args)
    model = rank_model(args, layers)
    vocab_size = known_vocab_size(args)  # as the run, too, knows it before it has a tokenizer
    division, facts = replace(division_of(args, vocab_size), given=layers), facts_of(args, device.name, vocab_size)
    asked = tokenizers_vocab_size(args) if vocab_size is None else None
    vocab_size = asked.size if asked is not None else vocab_size
    if vocab_size is not None:
        model = replace(model, vocab_size=vocab_size)
    if costs is not None:
        read = costs.file
        facts = {**facts, **({"gpu": read.facts["gpu"]} if "gpu" in read.facts else {})}  # measured, not assumed
        division = replace(division, predictions=())  # which the costs do not tell from the output layer
        figures = _measured(sizes, read, args.placement, division)
        if predictions and figures.layers is not None:
            figures = _noting(figures, _NO_PREDICTIONS)
        if different := differences(read.facts, facts):
            figures = _noting(figures, f"The costs in {costs.path} are of another job: {listed(different)}.")
    elif estimated:
        figures = _estimated(sizes, model, device, predictions, division)
        if asked is not None:
            figures = _noting(figures, f"The vocabulary of {asked.size:,} is that of {asked.source}, padded.")
        elif vocab_size is None:
            figures = _noting(
                figures,
                f"A vocabulary of {GPT2_VOCAB_SIZE:,} is assumed, since Megatron-LM asks the tokenizer: give "
                "--vocab-size, because gains depend on it.",
            )
    else:
        figures = _equal(sizes, ", ".join(others).capitalize(), bool(predictions))
    message_bytes = model.message_bytes * (1 if args.bf16 or args.fp16 else 2)
    figures = replace(figures, message_bytes=message_bytes, widths=_widths(job_predictions(args)), facts=facts)
    if not estimated:
        return figures
    figures = replace(figures, operations=operations(model, predictions))
    return _with_weights(figures, args, model, predictions, division)


def _widths(predictions: Sequence[int]) -> tuple[float, ...]:
    """The hidden states per token that each stage hands on: those of all depths of prediction so far, besides its own.

    Empty if every stage before the last hands on one.
    """
    states = tuple(accumulate(predictions, initial=1.0))[1:]
    return states if any(number > 1 for number in states[:-1]) else ()


def assumes_vocab_size(args: argparse.Namespace, costs_file: str | None) -> bool:
    """Whether estimates are for a vocabulary that neither the flags of a job nor its tokenizer give."""
    from megatron.zero_bubble.planning.job.arguments.tokenizer import known_vocab_size

    is_estimated = costs_file is None and not unestimated_kinds(args)
    return is_estimated and known_vocab_size(args) is None and tokenizers_vocab_size(args) is None


def gpu_bytes(text: str) -> int:
    """Parse the value of ``--gpu-memory``.

    Raises:
        UserError: for anything but a size such as ``80GiB``.
    """
    try:
        return parse_bytes(text)
    except UserError:
        raise UserError(
            f"--gpu-memory needs a size in bytes, such as 80GiB; got {text}; write {_meant(text)}"
        ) from None


def _meant(text: str) -> str:
    """The size that a number with another unit, or without one, probably means."""
    number = re.match("[0-9.]+", text)
    return f"{number[0] if number else 80}GiB"


def _with_weights(
    figures: Figures, args: argparse.Namespace, model: Model, predictions: tuple[str, ...], division: Division
) -> Figures:
    """Return figures with the bytes of weights, gradients and optimizer."""
    weights = ModelWeights(model, division, parameter_bytes(args), optimizer_replicas(args), predictions)
    taken = how_held(args.run.setup) or f"take {weights.held_text}"
    note = f"Weights, gradients and optimizer {taken}. Not counted: the CUDA context, NCCL "
    note += "buffers, fragmentation" + (", copies for a rollback." if args.run.setup.validates else ".")
    return replace(_noting(figures, note), weights=weights)


def _measured(sizes: tuple[int, int], read: CostsFile, placement: Placement, division: Division) -> Figures:
    """Return the costs in a file; those per layer are for the layout of the job."""
    read.check_links(placement.num_ranks)
    layers = read.layer_costs()
    if layers is not None and layers.num_layers != sum(division.given):
        raise UserError(
            f"costs per layer must be those of the job's model; {read.path} is of {layers.num_layers} layers, and the "
            f"job has {sum(division.given)}; record the costs of this job"
        )
    costs, memory = read.on_layout(placement, division.given) if layers is not None else read.on(placement)
    kept = PassMemory.uniform(placement) if memory is None else memory

    def on(other: Placement) -> tuple[PassCosts, PassMemory]:
        if layers is None or other == placement:
            return costs.fit(other), kept.fit(other)
        own, amounts = read.on_layout(other, division.on(other))
        return own, PassMemory.uniform(other) if amounts is None else amounts

    return Figures(
        *sizes,
        on,
        memory is not None,
        sequence=None if read.tokens is None else read.tokens.sequence,
        notes=(f"Costs are from {read.path}.", *((f"A lower bound: {HALVED}",) if read.halves(placement) else ())),
        layers=layers,
        division=None if layers is None else division,
        file=read,
    )


def _estimated(
    sizes: tuple[int, int], model: Model, device: Device, predictions: tuple[str, ...], division: Division
) -> Figures:
    notes = (
        "Times and memory are estimated from the model's shapes, not measured; use --costs for figures of a run.",
        f"{device}.",
        f"Attention {'uses flash kernels' if model.flash else 'stores its scores'}, recompute {_recomputed(model)}.",
        *_precision_notes(model, device),
        *model.assumed(device),
        *_graph_notes(model),
        *((PREDICTIONS,) if predictions else ()),
    )
    layers = with_predictions(layer_costs(model, device), model, device, predictions)
    return Figures(
        *sizes,
        lambda placement: layers.on(division.parts(placement)),
        True,
        notes=notes,
        most_layers=max(division.on(Placement.linear(sizes[0]))),
        sequence=model.sequence,
        layers=layers,
        division=division,
    )


def _precision_notes(model: Model, device: Device) -> tuple[str, ...]:
    """What is assumed of linear layers in a lower precision."""
    asked, found = model.precision, device.supported(model.precision)
    if asked == BF16:
        return ()
    if found != asked:
        return (f"{device.name} has no products in {asked.name}: all count as in bf16.",)
    share = device.efficiency / device.pace * asked.share
    low = f"Linear layers compute in {asked.name}, {device.peak(asked):g} TFLOPS at {share:.0%}, and quantize their"
    return (f"{low} operands; attention, the router and the output layer stay in bf16.",)


def _graph_notes(model: Model) -> tuple[str, ...]:
    """What is assumed of parts of layers in CUDA graphs."""
    inside = [part for part in model.captured if part in model.parts]
    if not inside:
        return ()
    keeps = f"CUDA graphs have {', '.join(inside)}, and keep memory for the most microbatches that a stage has at once"
    joined = set(inside) <= set(model.joined)
    w = "part of B" if joined else "a graph of its own, as TransformerEngine captures it from 2.13 on"
    return (f"{keeps}; W of these is {w}.",)


def _recomputed(model: Model) -> str:
    """What is recomputed, in words."""
    modules = model.keeping.modules
    return f"selective ({', '.join(modules)})" if modules else model.recompute


def _equal(sizes: tuple[int, int], what: str, predicts: bool) -> Figures:
    """Return passes that all take 1 ms, for a model with layers that are not estimated."""
    parts = f"layers{', multi-token prediction' if predicts else ''} and loss"
    note = (
        f"{what} are not estimated: every pass of every stage is assumed to take 1 ms, whatever its {parts} take, so "
        "that lengths in ms mean nothing and bubbles are those of equal stages; use --costs for figures of a run."
    )
    return Figures(*sizes, lambda on: (PassCosts.uniform(on, 1.0, 1.0, 1.0), PassMemory.uniform(on)), notes=(note,))


def _noting(figures: Figures, note: str) -> Figures:
    return replace(figures, notes=(*figures.notes, note))
