"""Compare training on slices of sequences with stock megatron-core on whole ones, on the same ranks and weights.

Sums over tokens are rounded in another order, so results are equal up to tolerances, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

from tests.helpers.parity import Tokens, _build, _named, _under_each

# 48 tokens can be cut into 2, 4, 8 and 16 equal slices, also on two tensor-parallel ranks.
LONG = "--seq-length 48 --max-position-embeddings 48"

_COUNTED = ", counted"
"""How the names end of what is no gradient."""

Prepare = Callable[[Sequence[torch.nn.Module]], Any]

HALF = {torch.bfloat16: "--bf16", torch.float16: "--fp16 --initial-loss-scale 16384"}


class Gradients(NamedTuple):
    """What one iteration computes on a pipeline.

    Attributes:
        losses: loss and number of tokens of every microbatch; empty except on the last rank.
        of: gradients of the weights of all stages, by name; biases of experts, which follow from the tokens that each
            one gets; and sums for the log, such as auxiliary losses.
    """

    losses: list[list[float]]
    of: dict[str, torch.Tensor]


class Difference(NamedTuple):
    """How far gradients are from the reference.

    Attributes:
        losses: the largest relative difference of a loss or number of tokens; 0 if there are none.
        worst: the largest difference of a weight's gradient, relative to the largest element of that gradient.
        whole: the norm of all differences, relative to the norm of the whole gradient.
    """

    losses: float
    worst: float
    whole: float

    @classmethod
    def between(cls, found: Gradients, reference: Gradients) -> Difference:
        assert len(found.losses) == len(reference.losses), "one report per microbatch"
        assert found.of.keys() == reference.of.keys(), found.of.keys() ^ reference.of.keys()
        pairs = zip(chain(*found.losses), chain(*reference.losses), strict=True)
        off = max((abs(own - other) / abs(other) for own, other in pairs), default=0.0)
        worst = max(float((found.of[n] - g).abs().max() / g.abs().max()) for n, g in reference.of.items())
        gradients = [(found.of[name], g) for name, g in reference.of.items() if not name.endswith(_COUNTED)]
        squares = [(float((own - g).square().sum()), float(g.square().sum())) for own, g in gradients]
        differences, norms = map(sum, zip(*squares, strict=True))
        return cls(off, worst, float((differences / norms) ** 0.5))


class Documents(Dataset):
    """Random samples of several documents, whose tokens do not attend to each other (``--reset-attention-mask``)."""

    def __init__(self, samples: Tokens) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = self._samples[index]
        length = len(sample["tokens"])
        document = torch.arange(length) // (5 + index)
        mask = (document[:, None] != document) | torch.ones(length, length, dtype=torch.bool).triu(1)
        return {**sample, "attention_mask": mask[None]}


def gradients_of(
    args: Any, start: dict[str, torch.Tensor] | None, prepare: Prepare = lambda _: None
) -> tuple[Gradients, dict[str, torch.Tensor]]:
    """Run the passes of one iteration; the caller has applied the schedule. Also returns the initial weights.

    ``prepare`` is called with the model chunks before the passes.
    """
    from megatron.core import parallel_state

    own, start = own_gradients_of(args, start, prepare)
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    parts: list[Any] = [None] * pipeline.size()
    torch.distributed.all_gather_object(parts, own.of, group=pipeline)
    merged: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, gradient in part.items():  # a sum for the log has what each rank has counted
            merged[name] = merged[name] + gradient if name in merged and name.endswith(_COUNTED) else gradient
    return Gradients(own.losses, merged), start


def own_gradients_of(
    args: Any, start: dict[str, torch.Tensor] | None, prepare: Prepare = lambda _: None
) -> tuple[Gradients, dict[str, torch.Tensor]]:
    """As ``gradients_of``, with only the gradients of this rank's weights."""
    from megatron.zero_bubble.engine.optimizer.log_sums import sums_for_the_log
    from megatron.zero_bubble.engine.platforms import select
    from megatron.zero_bubble.planning.job.arguments import tokenizer
    from pretrain import checkpoint, loop, model
    from pretrain.data.batches import Splits
    from pretrain.data.shares import share_of

    chunks, start = _build(args, start)
    optimizer = model.build_optimizer(args, chunks)
    model.connect(args, chunks, optimizer)
    samples: Dataset = Tokens(args.global_batch_size, args.seq_length, args.vocab_size)
    samples = Documents(samples) if args.reset_attention_mask else samples  # type: ignore[arg-type]
    vocab_size = tokenizer.padded_vocab_size(args, tokenizer.build_tokenizer(args))
    trained, splits = checkpoint.TrainedObjects(chunks, optimizer, None), Splits(samples, None, None, False, False)
    platform, device = select("cpu"), torch.device("cpu")
    trainer = loop.Trainer(args, platform, device, trained, splits, vocab_size, checkpoint.TrainState(), None)  # type: ignore[arg-type]
    trainer._zero_gradients()
    for total in sums_for_the_log().values():
        total.zero_()
    prepare(chunks)
    share = share_of(args, samples, 0, args.global_batch_size)
    reports = trainer._passes(trainer._microbatches(samples, 0), share)
    weights: dict[str, Any] = dict(_named(chunks))
    own = {name: weight.main_grad.clone().float() for name, weight in weights.items()} | _of_experts(chunks)
    own |= {f"{name}{_COUNTED}": total.clone() for name, total in sums_for_the_log().items() if total.any()}
    return Gradients([report["lm loss"].tolist() for report in reports], own), start


def _of_experts(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    modules: list[Any] = [module for chunk in chunks for module in chunk.modules()]
    routers = [module for module in modules if hasattr(module, "expert_bias")]
    biased = [(router.layer_number, router.expert_bias) for router in routers if router.expert_bias is not None]
    return {f"bias of experts in layer {number}{_COUNTED}": bias.clone() for number, bias in biased}


def differences(rank: int, flags: str, schedules: Sequence[str]) -> list[Difference]:
    """Return how far the gradients of each schedule are from those of stock; call it on a rank pool."""
    start, found = None, []
    for args, _ in _under_each(f"{LONG} {flags}", [None, *schedules]):
        gradients, start = gradients_of(args, start)
        found.append(gradients)
    return [Difference.between(gradients, found[0]) for gradients in found[1:]]


def distances_in_half(rank: int, flags: str, schedules: Sequence[str], half: torch.dtype) -> list[Difference]:
    """Return how far gradients in 16-bit precision are from stock's in float32: stock's own, then each schedule's."""
    start = None
    for _ in range(2):  # the reference has weights that the 16-bit type represents exactly
        for args, _pipeline in _under_each(f"{LONG} {flags}", [None]):
            exact, start = gradients_of(args, start)
            start = {name: weight.to(half).float() for name, weight in start.items()}
    found = []
    for args, _pipeline in _under_each(f"{LONG} {flags} {HALF[half]}", [None, *schedules]):
        scaled, _ = gradients_of(args, start)
        scale = args.initial_loss_scale if args.fp16 else 1.0
        found.append(scaled._replace(of={name: gradient / scale for name, gradient in scaled.of.items()}))
    return [Difference.between(gradients, exact) for gradients in found]
