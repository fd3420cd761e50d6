"""Train replicas on different numbers of microbatches of different shapes, and compare with all samples on each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.parity import _build, _named, _under_each

LENGTHS = (48, 11, 20, 21, 22, 23, 24, 5)
Assignment = tuple[list[list[int]], ...]
ASSIGNMENTS: tuple[Assignment, ...] = (
    ([[1], [0]], [[2], [3], [4], [5], [7, 6]]),
    ([[7, 1, 2], [3, 4], [5]], [[0], [6]]),
    ([[0]], [[7], [1], [2], [3], [4], [5], [6]]),
    ([[1], [0]], [[2], [3], [4], [5], [7, 6]]),
)
"""The microbatches of both replicas in four iterations, some with several packed samples. Reductions during the passes
begin with the second iteration.
"""
_TWO: Assignment = ([[1], [0]], [[2, 3], [4, 5]])
_FOUR: Assignment = ([[1], [0]], [[2], [7]], [[3, 4]], [[5, 6]])
SHARING: dict[int, tuple[Assignment, ...]] = {
    2: (_TWO, ([[7, 1, 2], [3], [5]], [[0], [6], [4]]), ([[0]], [[7]]), _TWO),
    4: (_FOUR, ([[7, 6]], [[1, 2]], [[3], [4]], [[5], [0]]), ([[0]], [[7]], [[1], [2], [3]], [[4], [5], [6]]), _FOUR),
}
"""The same for two and four replicas, of which two each share experts."""


def sample(index: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """A random sample of its own length, of which some tokens have no loss."""
    length = LENGTHS[index]
    text = torch.randint(vocab_size, (length + 1,), generator=torch.Generator().manual_seed(index))
    positions = torch.arange(length)
    return {
        "tokens": text[:-1],
        "labels": text[1:],
        "position_ids": positions,
        "loss_mask": (positions >= index % 3).float(),
    }


def worst_differences(rank: int, flags: str, schedule: str, scaled: bool = False) -> list[tuple[float, float]]:
    """Train four iterations on two replicas, without optimizer steps, and compare with stock, which trains all samples
    on each replica, one per microbatch, padded to the same length.

    Args:
        scaled: whether the loop divides its losses by the tokens of all replicas, and multiplies them by its own number
            of microbatches, as loops of reinforcement learning do, instead of Megatron.

    Returns:
        for each iteration, the largest difference of a gradient, relative to the largest of its weight, and the
        relative difference of the loss (0 on other ranks than the last of the pipeline).
    """
    from megatron.core import parallel_state

    from megatron.zero_bubble.integration.adapter.recent import Recent
    from megatron.zero_bubble.planning.job.balance import replicas_of_experts

    start: Any = None
    found: list[list[tuple[dict[str, torch.Tensor], float]]] = []
    packs = "--calculate-per-token-loss --zero-bubble-balance-microbatches --mock-data"
    for args, pipeline in _under_each(flags, [None, f"--zero-bubble-schedule {schedule} {packs}"]):
        args.calculate_per_token_loss &= pipeline is None or not scaled
        chunks, start = _build(args, start)
        trainer = _trainer(args, chunks)
        forward_step = trainer._forward_step
        if pipeline is not None and scaled:
            pipeline._prepared = Recent(1)  # so the plan of the first iteration is made again for the last one
        results = []
        for assignment in ASSIGNMENTS if replicas_of_experts(args) == 1 else SHARING[args.data_parallel_size]:
            everything = [[index] for own in assignment for microbatch in own for index in microbatch]
            own = everything if pipeline is None else assignment[parallel_state.get_data_parallel_rank()]
            if pipeline is not None and scaled:
                tokens = sum(int(sample(index, args.vocab_size)["loss_mask"].sum()) for [index] in everything)
                trainer._forward_step = _scaled(forward_step, len(own) * len(assignment) / tokens)
            results.append(_iteration(trainer, args, own, whole=pipeline is None))
        found.append(results)
    return [
        (
            max(float((g - reference[name]).abs().max() / reference[name].abs().max()) for name, g in of.items()),
            abs(loss - expected) / abs(expected) if expected else 0.0,
        )
        for (reference, expected), (of, loss) in zip(*found, strict=True)
    ]


def _scaled(forward_step: Any, factor: float) -> Any:
    """A forward step whose loss is multiplied by ``factor``, and not divided by tokens by Megatron."""

    def scaled_forward_step(batches: Any, model: Any) -> Any:
        output, loss = forward_step(batches, model)

        def scaled_loss(output: torch.Tensor) -> Any:
            total, _, report = loss(output)
            return total * factor, report

        return output, scaled_loss

    return scaled_forward_step


def _trainer(args: Any, chunks: Any) -> Any:
    from megatron.zero_bubble.engine.platforms import select
    from megatron.zero_bubble.planning.job.arguments import tokenizer
    from pretrain import checkpoint, loop, model
    from pretrain.data.batches import Splits

    optimizer = model.build_optimizer(args, chunks)
    model.connect(args, chunks, optimizer)
    vocab_size = tokenizer.padded_vocab_size(args, tokenizer.build_tokenizer(args))
    trained, splits = checkpoint.TrainedObjects(chunks, optimizer, None), Splits(None, None, None, False, False)
    of_device = select("cpu"), torch.device("cpu")
    return loop.Trainer(args, *of_device, trained, splits, vocab_size, checkpoint.TrainState(), None)  # type: ignore[arg-type]


def _iteration(
    trainer: Any, args: Any, own: Sequence[Sequence[int]], whole: bool
) -> tuple[dict[str, torch.Tensor], float]:
    """Run the passes of one iteration; returns the gradients of the pipeline by name, and the loss."""
    from megatron.core import parallel_state

    from megatron.zero_bubble.core.costs.lengths import SequenceShape
    from pretrain.data.documents import packed
    from pretrain.data.shares import Share
    from pretrain.loop import _mean_loss

    multiple = args.seq_length if whole else args.tensor_model_parallel_size
    batches = [packed([sample(index, args.vocab_size) for index in microbatch], multiple) for microbatch in own]
    shapes = None if whole else tuple(SequenceShape(*batch["tokens"].shape) for batch in batches)
    trainer._zero_gradients()
    chunks = trainer.trained.model
    reports = trainer._passes([iter(batches) for _ in chunks], Share(len(batches), shapes, 0, 0))
    for chunk in chunks if args.use_distributed_optimizer else ():
        _gather_gradients(chunk)
    parts: list[Any] = [None] * args.pipeline_model_parallel_size
    weights: dict[str, Any] = dict(_named(chunks))
    gradients = {name: weight.main_grad.clone().float() for name, weight in weights.items()}
    dist.all_gather_object(parts, gradients, group=parallel_state.get_pipeline_model_parallel_group())
    loss = _mean_loss(reports)
    return {name: gradient for part in parts for name, gradient in part.items()}, 0.0 if loss is None else float(loss)


def _gather_gradients(chunk: Any) -> None:
    """With the distributed optimizer, a replica has the sum of its own part of the gradients only."""
    from megatron.core import parallel_state

    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    of_experts = parallel_state.get_expert_data_parallel_group()
    for group, groups in ((replicas, chunk.bucket_groups), (of_experts, chunk.expert_parallel_bucket_groups)):
        for bucket in (bucket for each in groups for bucket in each.buckets):
            own = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, own, group=group)
