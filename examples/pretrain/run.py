"""Run a training job, from the command line to the exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.facts import Facts
from megatron.zero_bubble.engine.runtime.backends import queues_of_job
from megatron.zero_bubble.planning.job.arguments.checks import check
from megatron.zero_bubble.planning.job.arguments.model_checks import check_packages
from megatron.zero_bubble.planning.job.arguments.parser import parse
from megatron.zero_bubble.planning.job.facts import facts_of, gpu_kind, remarks_at_start
from megatron.zero_bubble.planning.job.installed import check_installed
from megatron.zero_bubble.planning.job.post_validation import forecast
from megatron.zero_bubble.planning.job.proved import check_counts
from pretrain.process import Launch
from pretrain.quiet import quiet

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer import TransformerConfig

    from megatron.zero_bubble.core.costs.lengths import Load
    from megatron.zero_bubble.engine.measure.recorder import Recorder
    from megatron.zero_bubble.engine.platforms import Platform
    from megatron.zero_bubble.integration.adapter.pipeline import Pipeline
    from megatron.zero_bubble.integration.adapter.tracer import Tracer
    from pretrain.checkpoint import TrainedObjects, TrainState
    from pretrain.report import Progress


def main(argv: Sequence[str]) -> int:
    """Run the training job with flags ``argv`` in this process, started by torchrun or alone.

    Returns:
        0 after training or a clean stop, 1 if another rank was lost, 2 if flags or files are invalid.
    """
    launch = Launch.from_environment()
    try:
        args = parse(argv)
        check_installed("torch", "megatron.core")
        switched_off = check(args, launch.world_size, launch.local_world_size)
        if launch.rank == 0 and switched_off:
            print("\n".join(f"{line}." for line in switched_off), flush=True)
        check_packages(args)
        return _run(args, launch)
    except UserError as error:
        # Print once per machine, because a file, a package or a device may be missing on one machine only.
        if launch.local_rank == 0 or not error.everywhere:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2


def _run(args: argparse.Namespace, launch: Launch) -> int:
    """Train, and notify the other ranks of how this rank ends."""
    import torch.distributed as dist

    from megatron.zero_bubble.engine.runtime.peers import Peers
    from pretrain.failure import lost_peer

    peers = Peers()
    try:
        train(args, launch, peers.watch_world)
        dist.destroy_process_group()
    except (SystemExit, KeyboardInterrupt) as error:
        peers.fail(error)
        raise
    except Exception as error:
        if peers.explain(error):
            return 1
        peers.fail(error)
        paragraph = lost_peer(error)
        if paragraph is None:
            raise
        print(f"error: {paragraph}", file=sys.stderr, flush=True)
        return 1
    peers.leave()
    return 0


def _check_plans(args: argparse.Namespace, backend: str) -> None:
    """Prove the plans of all batch sizes where there are several: a later one would end the job when it begins."""
    counts = sorted({size // args.batch_sizes.granule for size in args.batch_sizes.steps})
    divides = args.tensor_model_parallel_size > 1 or args.context_parallel_size > 1
    queues = queues_of_job(backend, divides)
    if args.source is not None and queues is not None and len(counts) > 1:
        runs = replace(args.zero_bubble.runs, queues=queues)
        check_counts(args.zero_bubble, args.source, args.pipeline_model_parallel_size, counts, runs)


def train(args: argparse.Namespace, launch: Launch, joined: Callable[[], None] = lambda: None) -> None:
    """Build model, data and optimizer from the checked ``args``, and train; imports megatron-core.

    Args:
        joined: called when this rank has joined the process group.

    Raises:
        UserError: a problem that the checks of the flags cannot find.
    """
    from megatron.zero_bubble.engine.platforms import select
    from pretrain.distributed import check_backend, describe_rank, initialize

    platform = select(args.run.observations.device)
    backend = args.distributed_backend or platform.backend
    check_backend(backend, platform, launch)
    _check_plans(args, backend)
    device = platform.setup(launch.local_rank)
    with quiet():
        _check_version()
        from pretrain import model
        from pretrain.failure import during

        config = model.build_config(args, device)
        with during(f"rank {launch.rank}, joining the other ranks"):
            initialize(args, launch, backend, joined)
    with during(describe_rank()):
        _train_rank(args, launch, platform, device, backend, config)


def _check_version() -> None:
    import megatron.core

    version = megatron.core.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < (0, 15):
        raise UserError(
            f"scripts/pretrain_gpt.py needs megatron-core 0.15 or newer, got {version}; install 0.16.1, or run "
            "Megatron-LM's own script under the launcher"
        )


def _train_rank(
    args: argparse.Namespace,
    launch: Launch,
    platform: Platform,
    device: torch.device,
    backend: str,
    config: TransformerConfig,
) -> None:
    """Build and train on a rank that has joined the process group."""
    with quiet():
        from megatron.zero_bubble.engine.measure.bubble_meter import BubbleMeter
        from megatron.zero_bubble.planning.job.arguments import tokenizer
        from pretrain import loop, stop
        from pretrain import report as progress
        from pretrain.data import batches as data
        from pretrain.distributed import describe_rank, group_of_hosts
        from pretrain.schedule import apply_schedule

    meter = BubbleMeter(platform) if args.run.observations.log_bubble else None
    trainer: loop.Trainer  # The functions read it later: it is built below, after the schedule is enabled.
    tracer = recorder = None
    if args.run.observations.records:
        loads = (lambda: trainer.loads) if args.run.balance is not None else None
        tracer, recorder = _tracer(args, platform, lambda: trainer.state.iteration + 1, loads)
    applied = apply_schedule(args, [one for one in (meter, tracer, recorder) if one is not None])
    if launch.rank == 0:
        _print_start(args, launch, platform, backend, config, applied.phrase)
    _make_folders(args)
    vocabulary = tokenizer.build_tokenizer(args)
    with quiet() if args.mock_data else nullcontext():
        splits = data.build_splits(args, vocabulary)
    vocab_size = tokenizer.padded_vocab_size(args, vocabulary)
    trained = _build(args, config, vocab_size, device, applied.pipeline)
    # The last rank has the losses: it holds the last stage, or receives them from the rank that does.
    reporting = launch.rank == launch.world_size - 1
    voters = group_of_hosts(args)
    with progress.Progress(reporting, args.train_iters, args.metrics_file, args.tensorboard_dir) as shown:
        state = _resume(args, trained, shown)
        trainer = loop.Trainer(args, platform, device, trained, splits, vocab_size, state, shown, meter=meter)
        if state.iteration < args.train_iters:
            data.check_length(args, splits, state.iteration, state.consumed_samples)
        try:
            with stop.StopRequest(voters, describe_rank()) as request:
                trainer.run(request)
        finally:
            if applied.pipeline:
                applied.pipeline.finish()
        if tracer:
            asked = args.run.observations
            directory, file = (Path(p) if p else None for p in (asked.trace, asked.record_costs))
            for sentence in tracer.write(directory, file, applied.pipeline):
                print(f"zero-bubble: {sentence}", flush=True)


def _tracer(
    args: argparse.Namespace,
    platform: Platform,
    number: Callable[[], int],
    loads: Callable[[], tuple[Load, ...]] | None,
) -> tuple[Tracer, Recorder]:
    from megatron.zero_bubble.engine.measure.recorder import Recorder
    from megatron.zero_bubble.integration.adapter.tracer import Packing, Tracer, end_of_run
    from megatron.zero_bubble.planning.job.arguments.tokenizer import known_vocab_size
    from megatron.zero_bubble.planning.job.balance import length_cost

    def end(first: int) -> int:
        return end_of_run(first, args.train_iters, args.exit_interval)

    recorder = Recorder(platform)
    name = args.run.setup.name if args.run.has_schedule else "stock 1f1b"
    packing = None
    if loads is not None:
        cost = length_cost(args.run.balance, args, known_vocab_size(args))
        packing = Packing(cost.whole(args.seq_length), loads)
    facts = partial(_facts, args)
    return Tracer(recorder, name, number, end, args.run.observations.trace_iterations, packing, facts), recorder


def _facts(args: argparse.Namespace, gpu: str) -> Facts:
    from megatron.zero_bubble.planning.job.arguments.tokenizer import known_vocab_size

    return facts_of(args, gpu_kind(gpu), known_vocab_size(args))


def _print_start(
    args: argparse.Namespace,
    launch: Launch,
    platform: Platform,
    backend: str,
    config: TransformerConfig,
    schedule: str,
) -> None:
    print(
        f"zero-bubble: {launch.world_size} ranks on {platform.describe()} over {backend}; "
        f"tensor {args.tensor_model_parallel_size} x pipeline {args.pipeline_model_parallel_size} x data "
        f"{args.data_parallel_size}, expert {args.expert_model_parallel_size}; {config.transformer_impl} layers; "
        f"{schedule}",
        flush=True,
    )
    num_microbatches = args.batch_sizes.final // args.batch_sizes.granule
    if args.run.setup.validates:
        print(f"zero-bubble: {forecast(args.source, num_microbatches)}", flush=True)
    config, facts = args.zero_bubble if args.run.has_schedule else None, lambda: _facts(args, platform.device_name())
    for sentence in remarks_at_start(args, args.source, num_microbatches, config, facts):
        print(f"zero-bubble: {sentence}", flush=True)
    if args.pipeline_model_parallel_layout:
        print(f"zero-bubble: layers by stage: {args.pipeline_model_parallel_layout}", flush=True)


def _make_folders(args: argparse.Namespace) -> None:
    """Create the output directories before training, so that a bad path fails at start-up."""
    from pretrain import checkpoint

    asked = args.run.observations
    for flag, directory in (
        ("--save", args.save),
        ("--zero-bubble-trace", asked.trace),
        ("--zero-bubble-record-costs", asked.record_costs and Path(asked.record_costs).parent),
    ):
        if directory:
            checkpoint.prepare(flag, directory)


def _build(
    args: argparse.Namespace,
    config: TransformerConfig,
    vocab_size: int,
    device: torch.device,
    pipeline: Pipeline | None,
) -> TrainedObjects:
    """Build the model, the optimizer and the learning-rate scheduler."""
    from pretrain import checkpoint, model
    from pretrain.schedule import step_ahead

    chunks = model.build_model(args, config, vocab_size, device)
    own = model.build_optimizer(args, chunks)
    model.connect(args, chunks, own)
    optimizer = step_ahead(args, pipeline, own, chunks)
    units = None if pipeline is None else pipeline.units
    return checkpoint.TrainedObjects(chunks, optimizer, model.build_scheduler(args, optimizer), units)


def _resume(args: argparse.Namespace, trained: TrainedObjects, shown: Progress) -> TrainState:
    from pretrain.checkpoint import TrainState, load

    if not args.load:
        return TrainState()
    state = load(args, trained)
    if state is None:
        shown.say(f" no checkpoint in {args.load}: starting from scratch")
        return TrainState()
    shown.say(f" loaded {args.load}: continuing after iteration {state.iteration}")
    return state
