"""Train the same model by stock megatron-core and by zero-bubble schedules on the same ranks, and compare every bit.

An option under test is written as the flags a user would give.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.zero_bubble.platforms import select

STEPS = 5

# Small, but with every kind of parameter: embeddings, norms, biases, column and row linears, an output layer.
BASE_FLAGS = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 2 --mock-data --tokenizer-type NullTokenizer --vocab-size 95 --make-vocab-size-divisible-by 8 "
    f"--train-iters {STEPS} --lr 1e-2 --weight-decay 0.01 --clip-grad 1.0 --attention-dropout 0 --hidden-dropout 0 "
    "--eval-iters 0 --num-workers 0 --transformer-impl local --zero-bubble-device cpu"
)


@dataclass(frozen=True)
class Outcome:
    """What one rank saw of one training run; equal outcomes are equal in every bit.

    Attributes:
        losses: the hexadecimal losses of every microbatch of every step, on the last stage.
        grad_norms: of every step, hexadecimal.
        weights: a digest of every parameter after the last step, by name.
    """

    losses: tuple[str, ...]
    grad_norms: tuple[str, ...]
    weights: dict[str, str]


def train(rank: int, flags: str, schedules: Sequence[str | None], evaluate: bool = False) -> list[Outcome]:
    """Run ``STEPS`` iterations under each schedule (None is stock) from the same start; call it on a rank pool."""
    from megatron.zero_bubble.config import ZeroBubbleConfig
    from megatron.zero_bubble.patching import apply, revert
    from megatron.zero_bubble.training.arguments import parse
    from megatron.zero_bubble.training.checks import check
    from megatron.zero_bubble.training.data import build_splits
    from megatron.zero_bubble.training.distributed import lay_out
    from megatron.zero_bubble.training.tokenizer import build_tokenizer

    args = parse([*BASE_FLAGS.split(), *flags.split()])
    check(args, torch.distributed.get_world_size())
    lay_out(args)
    splits = build_splits(args, build_tokenizer(args))
    outcomes = []
    for schedule in schedules:
        if schedule is not None:
            apply(ZeroBubbleConfig(schedule=schedule))
        try:
            outcomes.append(_train_once(args, splits, evaluate))
        finally:
            revert()
    return outcomes


def _train_once(args: Any, splits: Any, evaluate: bool) -> Outcome:
    from megatron.zero_bubble.training import checkpoint, loop, model, stop, tokenizer
    from megatron.zero_bubble.training.distributed import seed

    seed(args)
    platform = select("cpu")
    device = platform.device(0)
    config = model.build_config(args, device)
    vocab_size = tokenizer.padded_vocab_size(args, tokenizer.build_tokenizer(args))
    chunks = model.build_model(args, config, vocab_size, device)
    optimizer = model.build_optimizer(args, chunks)
    model.connect(args, chunks, optimizer)
    trained = checkpoint.Trained(chunks, optimizer, model.build_scheduler(args, optimizer))
    seen = _Seen()
    trainer = loop.Trainer(
        args, platform, device, trained, splits, vocab_size, checkpoint.TrainState(), seen, seen.around_passes
    )
    with stop.StopRequest(device, "a test") as request:
        trainer.run(request)
    if evaluate:
        args.eval_iters = 1
        trainer.evaluate("train", splits.train, present=True)
        args.eval_iters = 0
    return Outcome(tuple(seen.losses), tuple(seen.grad_norms), _digests(chunks))


class _Seen:
    """Stands where a run reports its progress, and keeps the bits."""

    def __init__(self) -> None:
        self.losses: list[str] = []
        self.grad_norms: list[str] = []

    def around_passes(self, _iteration: int, passes: Callable[[], Any]) -> Any:
        reports = passes()
        self.losses += [value.hex() for report in reports for value in report["lm loss"].tolist()]
        return reports

    def iterations(self, done: Sequence[Any]) -> None:
        self.grad_norms += [float(metrics.grad_norm).hex() for metrics in done]

    def evaluation(self, _iteration: int, split: str, loss: float | None) -> None:
        self.losses.append(f"{split} {None if loss is None else loss.hex()}")

    def say(self, _text: str) -> None:
        return None


def _digests(chunks: Sequence[torch.nn.Module]) -> dict[str, str]:
    return {
        name: hashlib.sha256(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
    }


def assert_same_bits(results: list[list[Outcome]], schedules: Sequence[str | None]) -> None:
    """Compare every schedule's outcome with the first one's, rank by rank, and name what differs first."""
    for rank, outcomes in enumerate(results):
        reference = outcomes[0]
        assert reference.grad_norms, "the reference run reported no gradient norm"
        for schedule, outcome in zip(schedules[1:], outcomes[1:], strict=True):
            where = f"rank {rank}, {schedule} against {schedules[0] or 'stock 1F1B'}"
            assert outcome.losses == reference.losses, f"losses differ on {where}"
            assert outcome.grad_norms == reference.grad_norms, f"gradient norms differ on {where}"
            different = [name for name, digest in outcome.weights.items() if digest != reference.weights[name]]
            assert not different, f"weights differ on {where}: {different}"
