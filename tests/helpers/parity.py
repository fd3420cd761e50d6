"""Train one model with stock megatron-core and with zero-bubble schedules on the same ranks, and compare bit for bit.

Options under test are given as command-line flags. By default a run trains five steps and evaluates after every third.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from megatron.zero_bubble.engine.platforms import select
from tests.helpers.progress import RecordedProgress
from tests.helpers.shards import read_each

STEPS = 5

# Small, but with every kind of parameter: embeddings, norms, biases, column and row linears, an output layer. Without
# weight decay, a parameter changes only if its gradient is not zero.
BASE_FLAGS = (
    "--hidden-size 16 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8 "
    "--micro-batch-size 2 --mock-data --tokenizer-type NullTokenizer --vocab-size 31 --make-vocab-size-divisible-by 8 "
    f"--train-iters {STEPS} --lr 1e-2 --weight-decay 0 --clip-grad 0 --attention-dropout 0 --hidden-dropout 0 "
    "--eval-iters 1 --eval-interval 3 --transformer-impl local --zero-bubble-device cpu"
)


@dataclass(frozen=True)
class Layout:
    """Number of ranks per parallel dimension; ``num_layers`` 0 means one layer per pipeline rank."""

    pipeline: int
    tensor: int = 1
    data: int = 1
    num_layers: int = 0

    @property
    def num_ranks(self) -> int:
        return self.pipeline * self.tensor * self.data

    @property
    def words(self) -> str:
        """The layout as part of a test id."""
        return f"p={self.pipeline} t={self.tensor} d={self.data}"

    def flags(self, num_microbatches: int, options: str = "") -> str:
        """Return the layout's flags, its batch sizes (two samples per microbatch), then ``options``."""
        return (
            f"--num-layers {self.num_layers or self.pipeline} --pipeline-model-parallel-size {self.pipeline} "
            f"--tensor-model-parallel-size {self.tensor} "
            f"--global-batch-size {2 * num_microbatches * self.data} {options}"
        )


@dataclass(frozen=True)
class Outcome:
    """Results of one rank in one training run; equal outcomes are equal bit for bit.

    Attributes:
        losses: hexadecimal losses per microbatch and step (last stage only), and of the evaluations.
        grad_norms: hexadecimal norm per step; "skipped" if the loss scale overflowed.
        weights: digest of each parameter after the last step, by its name in the whole model.
        states: digests of the optimizer's parameters and of their states.
        loss_scales: loss scale after each step.
        num_zeros: number of zeros in the gradients of each step, if counted.
        counts: kinds of steps taken by a ``PostValidatedOptimizer``.
        unmoved: parameters that no step changed; the test could not notice the loss of their gradients.
        counted: side effects of forwards (number of runs, sums for the log), where a test collects them.
    """

    losses: tuple[str, ...]
    grad_norms: tuple[str, ...]
    weights: dict[str, str]
    states: tuple[str, ...]
    loss_scales: tuple[float, ...]
    num_zeros: tuple[float | None, ...]
    counts: Counter[str]
    unmoved: tuple[str, ...]
    counted: tuple[str, ...] = ()


class Tokens(Dataset):
    """Random samples with unequal loss masks, so that the mean over tokens differs from the mean over microbatches."""

    def __init__(self, num_samples: int, seq_length: int, vocab_size: int) -> None:
        self._shape = (num_samples, seq_length, vocab_size)

    def __len__(self) -> int:
        return self._shape[0]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        _, length, vocab_size = self._shape
        text = torch.randint(vocab_size, (length + 1,), generator=torch.Generator().manual_seed(index))
        positions = torch.arange(length)
        mask = (positions >= index * 3 % length).float()
        return {"tokens": text[:-1], "labels": text[1:], "position_ids": positions, "loss_mask": mask}


def run_once(args: Any) -> None:
    """Train once with checked flags on random samples; the caller has applied the schedule."""
    _train_once(args, _splits(args), None)


def _splits(args: Any) -> Any:
    from megatron.zero_bubble.planning.job.arguments.tokenizer import build_tokenizer
    from pretrain.data.batches import Splits, build_splits, reads_data

    if args.run.balance is not None:
        return build_splits(args, build_tokenizer(args))
    samples = Tokens(args.batch_sizes.samples_after(args.train_iters), args.seq_length, args.vocab_size)
    read = samples if reads_data(args) else None
    return Splits(read, read, None, has_valid=True, has_test=False)


def train(rank: int, flags: str, schedules: Sequence[str | None]) -> list[Outcome]:
    """Train with each schedule (None is stock) from the same initial weights; call it on a rank pool.

    A schedule with another placement starts from the first schedule's initial weights.
    """
    start = None
    outcomes = []
    for args, pipeline in _under_each(flags, schedules):
        outcome, start = _train_once(args, _splits(args), start, pipeline)
        outcomes.append(outcome)
    return outcomes


def _under_each(flags: str, schedules: Sequence[str | None]) -> Iterator[tuple[Any, Any]]:
    """Apply each schedule in turn; yield the checked flags and the pipeline, which is None for stock."""
    from megatron.zero_bubble.integration.patching import apply, revert
    from megatron.zero_bubble.planning.job.arguments.checks import check
    from megatron.zero_bubble.planning.job.arguments.parser import parse
    from megatron.zero_bubble.planning.job.flags import given_in

    placement = None
    for schedule in schedules:
        words = flags.split()
        if schedule is None:
            given, words = given_in([*BASE_FLAGS.split(), *words])  # stock does not know our flags
            words += ["--zero-bubble-device", given.get("device", "auto")]
        else:
            words += schedule.split() if schedule[0] == "-" else ["--zero-bubble-schedule", *schedule.split()]
            words += [] if "--zero-bubble-fuse-wgrad" in flags else ["--zero-bubble-exact"]
        args = parse([*BASE_FLAGS.split(), *words])
        check(args, torch.distributed.get_world_size())
        if args.placement != placement:
            rebuild_process_groups(args)
            placement = args.placement
        pipeline = None if schedule is None else apply(args.zero_bubble)
        try:
            yield args, pipeline
            assert pipeline is None or pipeline.num_pending == 0, f"{schedule} left gradients or messages behind"
        finally:
            revert()


def _device(args: Any) -> torch.device:
    """The rank's device; a pool of CPU ranks has installed its platform, ranks on GPUs may share one."""
    platform = select(args.run.observations.device)
    device = platform.device(torch.distributed.get_rank())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def rebuild_process_groups(args: Any) -> None:
    """Replace Megatron's process groups by those for ``args``; old groups are destroyed because each has threads."""
    from megatron.core import parallel_state, rerun_state_machine

    from pretrain.distributed import lay_out

    parallel_state.destroy_model_parallel()
    rerun_state_machine.destroy_rerun_state_machine()
    for group in list(torch.distributed.distributed_c10d._world.pg_map):
        if group is not torch.distributed.group.WORLD:
            torch.distributed.destroy_process_group(group)
    lay_out(args)


def _build(args: Any, start: dict[str, torch.Tensor] | None) -> tuple[Any, dict[str, torch.Tensor]]:
    """Build the rank's model chunks, with the pipeline's weights ``start`` if given; return chunks and weights."""
    from megatron.core import parallel_state

    from megatron.zero_bubble.planning.job.arguments import tokenizer
    from pretrain import model
    from pretrain.distributed import seed

    seed(args)
    device = _device(args)
    config = model.build_config(args, device)
    vocab_size = tokenizer.padded_vocab_size(args, tokenizer.build_tokenizer(args))
    chunks = model.build_model(args, config, vocab_size, device)
    if start is None:
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        parts: list[Any] = [None] * pipeline.size()
        own = {name: weight.detach().cpu().clone() for name, weight in _named(chunks)}
        torch.distributed.all_gather_object(parts, own, group=pipeline)
        start = {name: weight for part in parts for name, weight in part.items()}
    for name, weight in _named(chunks):
        weight.data.copy_(own_rows(chunks, weight, start[name]))
    return chunks, start


def own_rows(chunks: Any, weight: torch.Tensor, of_stock: torch.Tensor) -> torch.Tensor:
    """The rows of a stock weight that ``weight`` has: all, unless the vocabulary is divided over the pipeline."""
    if weight.shape == of_stock.shape:
        return of_stock
    from megatron.core import parallel_state

    from megatron.zero_bubble.integration.adapter.vocabulary.shards import VocabularyShards

    tensor = parallel_state.get_tensor_model_parallel_group()
    of_stock = of_stock.to(weight.device).contiguous()
    pieces = [torch.empty_like(of_stock) for _ in range(tensor.size())]
    torch.distributed.all_gather(pieces, of_stock, group=tensor)
    rows = VocabularyShards.of(chunks[0]).output.rows
    return torch.cat([*pieces, of_stock.new_zeros(weight.shape)])[rows.first : rows.first + rows.num_rows]


def _train_once(
    args: Any,
    splits: Any,
    start: dict[str, torch.Tensor] | None,
    pipeline: Any = None,
    on_start: Callable[[Any, Any], None] = lambda _chunks, _seen: None,
) -> tuple[Outcome, dict[str, torch.Tensor]]:
    """Train once, from the pipeline's weights ``start`` if given; return the outcome and the initial weights.

    ``on_start`` is called with the model chunks and the progress before the first iteration.
    """
    from megatron.zero_bubble.engine.optimizer.post_validation import PostValidatedOptimizer
    from megatron.zero_bubble.planning.job.arguments import tokenizer
    from pretrain import checkpoint, loop, model, stop
    from pretrain import schedule as zero_bubble
    from pretrain.distributed import group_of_hosts

    platform, device = select(args.run.observations.device), _device(args)
    vocab_size = tokenizer.padded_vocab_size(args, tokenizer.build_tokenizer(args))
    chunks, start = _build(args, start)
    before = _digests(chunks)
    optimizer = model.build_optimizer(args, chunks)
    model.connect(args, chunks, optimizer)
    optimizer = zero_bubble.step_ahead(args, pipeline, optimizer, chunks)
    trained = checkpoint.TrainedObjects(
        chunks, optimizer, model.build_scheduler(args, optimizer), pipeline and pipeline.units
    )
    seen = RecordedProgress(args.train_iters)
    on_start(chunks, seen)

    class Trainer(loop.Trainer):
        def _passes(self, batches: Any, share: Any, forward_only: bool = False) -> Any:
            if forward_only:
                return super()._passes(batches, share, forward_only)
            seen.iteration = self.state.iteration + 1
            reports = super()._passes(batches, share)
            seen.losses += [value.hex() for report in reports for value in report["lm loss"].tolist()]
            return reports

    with stop.StopRequest(group_of_hosts(args), "a test") as request:
        Trainer(args, platform, device, trained, splits, vocab_size, checkpoint.TrainState(), seen).run(request)
    if args.overlap_param_gather:  # otherwise only the next forward would gather the last step's weights
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)
    after = read_each(trained.units, chunks, _digests)
    unmoved = tuple(name for name, digest in before.items() if after[name] == digest)
    outcome = Outcome(
        tuple(seen.losses),
        tuple(seen.grad_norms),
        after,
        _states(optimizer),
        tuple(seen.loss_scales),
        tuple(seen.num_zeros),
        optimizer.counts if isinstance(optimizer, PostValidatedOptimizer) else Counter(),
        unmoved,
    )
    return outcome, start


def _digests(chunks: Sequence[torch.nn.Module]) -> dict[str, str]:
    digests: dict[str, str] = {}
    for name, parameter in _named(chunks):
        assert digests.setdefault(name, _digest(parameter)) == _digest(parameter), f"copies of {name} differ"
    return digests


def _digest(tensor: torch.Tensor) -> str:
    whole = tensor.detach().cpu().clone().reshape(-1).view(torch.uint8)  # sharded units cannot resize what numpy has
    return hashlib.sha256(whole.numpy().tobytes()).hexdigest()[:16]


def _states(optimizer: Any) -> tuple[str, ...]:
    """Return digests of the parameters and states of the underlying torch optimizers."""
    found = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in [] if part.is_stub_optimizer else part.optimizer.param_groups:
            for parameter in group["params"]:
                kept = sorted(part.optimizer.state.get(parameter, {}).items())
                found.append(" ".join([_digest(parameter), *(f"{name} {_digest(t)}" for name, t in kept)]))
    return tuple(found)


def _named(chunks: Sequence[torch.nn.Module]) -> list[tuple[str, torch.nn.Parameter]]:
    """Return this rank's parameters by their names in the whole model, with global layer numbers.

    A rank that has the embedding and its copy for multi-token prediction has two parameters of this name.
    """
    from megatron.core.utils import get_attr_wrapped_model

    found = []
    for chunk in chunks:
        model = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
        numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
        for name, parameter in model.named_parameters():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(numbers[int(parts[2])])
            found.append((".".join(parts), parameter))
    return found


def assert_same_model(
    results: list[list[Outcome]],
    schedules: Sequence[str | None],
    layout: Layout,
    steps: int = STEPS,
    unused: Sequence[str] = (),
) -> None:
    """Compare schedules with different placements: all losses and weights are equal bit for bit, on whatever rank.

    Gradient norms are equal up to rounding: they are sums over ranks, and each rank has other parameters. ``unused``
    are as in ``assert_same_bits``.
    """
    model_ranks = layout.tensor * layout.data
    reference = [outcomes[0] for outcomes in results]
    unmoved = {name for outcome in reference for name in outcome.unmoved}
    assert not unmoved - set(unused), "the reference run must change every parameter"
    for index, schedule in enumerate(schedules[1:], 1):
        own = [outcomes[index] for outcomes in results]
        where = f"{schedule} against {schedules[0] or 'stock 1F1B'}"
        assert [outcome.losses for outcome in own] == [outcome.losses for outcome in reference], where
        for outcome, expected in zip(own, reference, strict=True):
            assert len(outcome.grad_norms) == steps, where
            assert _norms(outcome) == pytest.approx(_norms(expected), rel=1e-6), where
        for first in range(model_ranks):
            pipeline = slice(first, None, model_ranks)
            weights, wanted = (_merged(part[pipeline]) for part in (own, reference))
            different = [name for name in wanted if weights.get(name) != wanted[name]]
            assert weights.keys() == wanted.keys() and not different, f"weights differ, {where}: {different}"


def _norms(outcome: Outcome) -> list[float]:
    return [-1.0 if norm == "skipped" else float.fromhex(norm) for norm in outcome.grad_norms]


def _merged(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Merge the weights of all ranks of a pipeline."""
    return {name: digest for outcome in outcomes for name, digest in outcome.weights.items()}


def assert_same_bits(
    results: list[list[Outcome]], schedules: Sequence[str | None], steps: int = STEPS, unused: Sequence[str] = ()
) -> None:
    """Compare every schedule's outcome with the first schedule's, rank by rank, and name the first difference.

    ``unused`` lists parameters that Megatron creates and no forward uses.
    """
    for rank, outcomes in enumerate(results):
        reference = outcomes[0]
        assert len(reference.grad_norms) == steps, "the reference run must report the norm of every step"
        assert not set(reference.unmoved) - set(unused), f"rank {rank}: the reference run must change every parameter"
        for schedule, outcome in zip(schedules[1:], outcomes[1:], strict=True):
            where = f"rank {rank}, {schedule} against {schedules[0] or 'stock 1F1B'}"
            assert outcome.losses == reference.losses, f"losses differ on {where}"
            assert outcome.grad_norms == reference.grad_norms, f"gradient norms differ on {where}"
            assert outcome.num_zeros == reference.num_zeros, f"numbers of zeros differ on {where}"
            assert outcome.loss_scales == reference.loss_scales, f"loss scales differ on {where}"
            assert outcome.counted == reference.counted, f"counts of forwards differ on {where}"
            different = [name for name, digest in outcome.weights.items() if digest != reference.weights[name]]
            assert not different, f"weights differ on {where}: {different}"
            assert outcome.states == reference.states, f"optimizer states differ on {where}"
