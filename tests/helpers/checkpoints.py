"""Read checkpoints, and pass them on from one job to another, on the rank pool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.helpers.ranks import RankPool
from tests.helpers.training import SMALL


def pass_on(ranks: RankPool, num_ranks: int, flags: str) -> None:
    """Load the checkpoint under ``--load`` into a job with ``flags``, and save it under ``--save`` without a step."""
    ranks.run(num_ranks, _load_and_save, num_ranks, [*SMALL.split(), *flags.split()], timeout=100)


def _load_and_save(rank: int, num_ranks: int, flags: Sequence[str]) -> None:
    from megatron.zero_bubble.engine.platforms import select
    from megatron.zero_bubble.integration.patching import revert
    from megatron.zero_bubble.planning.job.arguments import tokenizer
    from megatron.zero_bubble.planning.job.arguments.checks import check
    from megatron.zero_bubble.planning.job.arguments.parser import parse
    from pretrain import checkpoint, model, run
    from pretrain.distributed import initialize
    from pretrain.process import Launch
    from pretrain.schedule import apply_schedule

    args = parse(flags)
    check(args, num_ranks)
    device = select("cpu").device(rank)
    initialize(args, Launch(rank, num_ranks, rank, num_ranks, under_torchrun=True), "gloo")
    applied = apply_schedule(args)
    try:
        size = tokenizer.padded_vocab_size(args, tokenizer.build_tokenizer(args))
        trained = run._build(args, model.build_config(args, device), size, device, applied.pipeline)
        state = checkpoint.load(args, trained)
        assert state is not None, "there is a checkpoint to load"
        checkpoint.save(args, trained, state)
    finally:
        revert()


def tensors(ranks: RankPool, directory: Path) -> dict[str, torch.Tensor]:
    """All weights and optimizer states of the newest checkpoint in ``directory``, whole, by name."""
    (found,) = ranks.run(1, _read, directory, timeout=60)
    return dict(found)


def _read(_rank: int, directory: Path) -> dict[str, torch.Tensor]:
    from pretrain import checkpoint

    iteration = checkpoint.latest_iteration(directory)
    assert iteration is not None, "there is a checkpoint to read"
    reader = dcp.FileSystemReader(checkpoint.checkpoint_path(directory, iteration))
    stored = reader.read_metadata().state_dict_metadata
    sizes = {name: of for name, of in stored.items() if isinstance(of, TensorStorageMetadata)}
    found = {name: torch.empty(of.size, dtype=of.properties.dtype) for name, of in sizes.items()}
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found
