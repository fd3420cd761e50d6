"""Checkpoints in megatron-core's ``torch_dist`` format, written atomically.

A checkpoint is written to ``iter_0000010.writing`` and renamed to ``iter_0000010`` when every rank has finished; then
``latest_checkpointed_iteration.txt`` is replaced. A crash at any moment leaves the previous checkpoint loadable. A
checkpoint contains the weights, the optimizer's state, the learning-rate schedule, all random states and the number of
consumed samples, so that a resumed run computes the same bits as an uninterrupted one. ``files.json`` lists the files
and their sizes, to detect truncated copies.
"""

from __future__ import annotations

import argparse
import contextlib
import pickle
import shutil
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint.api import CheckpointException

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.files import make_writable
from megatron.zero_bubble.core.formats.layout import job_layers, layout_text, stages_text
from megatron.zero_bubble.engine.optimizer import random_state
from megatron.zero_bubble.engine.optimizer.post_validation import PostValidatedOptimizer
from megatron.zero_bubble.engine.runtime.transport import lost_connection
from megatron.zero_bubble.integration.adapter.placement import as_pipeline_rank, megatron_rank
from megatron.zero_bubble.integration.adapter.shards import ShardedUnits
from megatron.zero_bubble.integration.adapter.whole_weights import copy_weights
from megatron.zero_bubble.planning.job.model import uneven_layout
from pretrain.checkpoint_folder import (
    TRACKER,
    WRITING,
    checkpoint_path,
    incompleteness,
    latest_iteration,
    publish,
)
from pretrain.distributed import agree

# Sizes of the parallel layout, which determine the rank that a random state belongs to.
_LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "data_parallel_size",
    "expert_model_parallel_size",
)
# Errors that megatron-core and torch raise for files that are damaged or contain another model.
_LOAD_ERRORS = (
    CheckpointingException,
    CheckpointException,
    RuntimeError,
    ValueError,
    KeyError,
    OSError,
    EOFError,
    pickle.UnpicklingError,
)


@dataclass
class TrainState:
    """Progress of the training."""

    iteration: int = 0
    consumed_samples: int = 0
    skipped_iterations: int = 0


@dataclass(frozen=True)
class TrainedObjects:
    """Objects whose state a checkpoint saves and restores, in addition to :class:`TrainState`."""

    model: list[Any]
    optimizer: MegatronOptimizer | PostValidatedOptimizer
    scheduler: OptimizerParamScheduler
    units: ShardedUnits | None = None  # weights may be shards


def prepare(flag: str, directory: str | Path) -> None:
    """Create the directory that ``flag`` will write to, so that a bad path fails at start-up; a collective call.

    Raises:
        UserError: on every rank, when rank 0 cannot write there.
    """
    problem: str | None = None
    if dist.get_rank() == 0:
        try:
            make_writable(directory)
        except OSError as error:
            problem = f"{flag} needs a writable directory, got {directory} ({error.strerror}); give another path"
    agree(problem)


def save(args: argparse.Namespace, trained: TrainedObjects, state: TrainState) -> Path:
    """Write a checkpoint under ``--save``; a collective call that returns when it is complete."""
    final = checkpoint_path(args.save, state.iteration)
    writing = final.with_name(final.name + WRITING)
    if dist.get_rank() == 0:
        shutil.rmtree(writing, ignore_errors=True)  # left by a run that crashed
        writing.mkdir(parents=True)
    dist.barrier()
    metadata = _metadata(args)
    contents = _contents(args, trained, metadata)
    if trained.units is not None and trained.units.steps_shards:
        copy_weights(trained.units, [contents[_model_key(trained, index)] for index in range(len(trained.model))])
    contents |= {"train_state": asdict(state), "layout": _layout(args), "layers": list(job_layers(args))}
    on_disk = {name: value for name, value in metadata.items() if name != "dp_cp_group"}
    dist_checkpointing.save(contents, str(writing), content_metadata=on_disk)
    dist.barrier()
    if dist.get_rank() == 0:
        publish(writing, final, state.iteration)
    dist.barrier()
    return final


def load(args: argparse.Namespace, trained: TrainedObjects) -> TrainState | None:
    """Restore the newest checkpoint under ``--load``; None when there is none. A collective call.

    Random states belong to ranks: under a parallel layout other than the saved one, they are seeded from ``--seed``.

    Raises:
        UserError: on every rank, when the checkpoint is missing (and ``--exit-on-missing-checkpoint``), incomplete,
            or does not fit the model of this run.
    """
    iteration = _agreed_iteration(args.load)
    if iteration is None:
        if args.exit_on_missing_checkpoint:
            raise UserError(f"--load needs a checkpoint, but {args.load} has no {TRACKER}; correct the path")
        return None
    path = checkpoint_path(args.load, iteration)
    agree(incompleteness(path))
    common: dict[str, Any] = {}
    try:
        common = dist_checkpointing.load_common_state_dict(str(path))
        metadata = _merged_metadata(args, common)
        same_layout = _saved_layout(common) == _layout(args)
        _check_layout(args, path, common, same_layout)
        _allocate_optimizer_state(trained.optimizer)
        request = _contents(args, trained, metadata, loading=True, random_states=same_layout)
        _restore(trained, request.keys(), dist_checkpointing.load(request, str(path)))
        return TrainState() if args.finetune else _train_state(common)
    except UserError:
        raise
    except _LOAD_ERRORS as error:
        if lost_connection(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        text = " ".join(str(error).split())[:300]
        raise UserError(
            f"the checkpoint {path} cannot be loaded into this model ({type(error).__name__}: {text}); use the model "
            f"flags it was saved with{_layout_of_0_1(args, common)}, or write an earlier iteration into "
            f"{Path(args.load) / TRACKER}",
            everywhere=False,
        ) from error


def _saved_layout(common: dict[str, Any]) -> dict[str, Any]:
    """The layout of a checkpoint; those of version 0.1 lack the placement, which was one stage per rank."""
    layout = dict(common.get("layout") or {})
    layout.setdefault("stage_to_rank", list(range(layout.get("pipeline_model_parallel_size", 0))))
    return layout


def _loads_optimizer_by_rank(args: argparse.Namespace, common: dict[str, Any]) -> bool:
    """Whether the job loads an optimizer state that belongs to the parameters of a rank, not to those of the model."""
    by_rank = _merged_metadata(args, common).get("distrib_optim_sharding_type") == "dp_reshardable"
    return by_rank and args.use_distributed_optimizer and args.load_optim and not args.finetune


def _check_layout(args: argparse.Namespace, path: Path, common: dict[str, Any], same_layout: bool) -> None:
    if not _loads_optimizer_by_rank(args, common):
        return
    saved, own = common.get("layers"), list(job_layers(args))
    if not same_layout:
        what, use = "layout of ranks and stages it was saved with", "use that layout"
    elif saved not in (None, own):
        what = f"layers per stage it was saved with, {stages_text(saved)}; this job has {stages_text(own)}"
        use = f"give --pipeline-model-parallel-layout '{layout_text(saved)}'"
    else:
        return
    raise UserError(
        f"the state of the distributed optimizer in {path} can only be loaded with the {what}; {use}, save with "
        "--dist-ckpt-optim-fully-reshardable, or add --no-load-optim"
    )


def _layout_of_0_1(args: argparse.Namespace, common: dict[str, Any]) -> str:
    """A remedy for checkpoints that do not tell how many layers their stages have; empty for others."""
    uneven = args.num_layers % args.placement.num_stages
    if not (common and uneven and "layers" not in common and _loads_optimizer_by_rank(args, common)):
        return ""
    layout = uneven_layout(args, args.placement, None)
    return f", with --pipeline-model-parallel-layout '{layout}' if it was saved by version 0.1"


def _agreed_iteration(directory: str) -> int | None:
    """The iteration that rank 0 reads from the tracker file, on every rank.

    If every rank read the file, ranks could load different iterations on a file system that is slow to synchronize or
    not shared.
    """
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            found[0] = latest_iteration(directory)
        except UserError as error:
            found[1] = str(error)
    dist.broadcast_object_list(found, src=0)
    agree(found[1])
    return found[0]


def _train_state(common: dict[str, Any]) -> TrainState:
    if "train_state" not in common:
        raise ValueError("it was not saved by this program and lacks the number of consumed samples; add --finetune")
    return TrainState(**common["train_state"])


def _contents(
    args: argparse.Namespace,
    trained: TrainedObjects,
    metadata: dict[str, Any],
    loading: bool = False,
    random_states: bool = True,
) -> dict[str, Any]:
    """The contents of a checkpoint to save, or to request when ``loading``, as megatron-core's sharded state dicts."""
    optimizer = args.load_optim and not args.finetune if loading else args.save_optim
    random_states &= args.load_rng and not args.finetune if loading else args.save_rng
    contents: dict[str, Any] = {}
    for index, chunk in enumerate(trained.model):
        rank = parallel_state.get_pipeline_model_parallel_rank()
        with as_pipeline_rank(megatron_rank(args.placement, rank, index)):
            contents[_model_key(trained, index)] = chunk.module.sharded_state_dict(metadata=metadata)
    if optimizer:
        contents["optimizer"] = trained.optimizer.sharded_state_dict(contents, is_loading=loading, metadata=metadata)
        contents["opt_param_scheduler"] = trained.scheduler.state_dict()
    if random_states:
        contents["rng_state"] = _random_states()
    return contents


def _restore(trained: TrainedObjects, wanted: Collection[str], loaded: dict[str, Any]) -> None:
    for index, chunk in enumerate(trained.model):
        chunk.module.load_state_dict(loaded[_model_key(trained, index)], strict=True)
    if "optimizer" in wanted:
        with _steps_apart(trained.optimizer, loaded["optimizer"]):
            trained.optimizer.load_state_dict(loaded["optimizer"])
        _restore_steps(trained.optimizer)
        trained.scheduler.load_state_dict(loaded["opt_param_scheduler"])
    else:
        trained.optimizer.reload_model_params()
    if "rng_state" in wanted:
        random_state.restore(loaded["rng_state"])


def _torch_adams(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Adam]:
    """torch's Adam optimizers inside ``optimizer``; none where TransformerEngine or Apex provide Adam."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW):
            yield part.optimizer


def _allocate_optimizer_state(optimizer: MegatronOptimizer) -> None:
    """Allocate torch Adam's state: megatron-core 0.16's distributed optimizer reads its step before loading one."""
    for adam in _torch_adams(optimizer):
        for parameter in (parameter for group in adam.param_groups for parameter in group["params"]):
            if not adam.state[parameter]:
                adam.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


@contextlib.contextmanager
def _steps_apart(optimizer: MegatronOptimizer, loaded: dict[str, Any]) -> Iterator[None]:
    """Drop torch Adam's step while fully reshardable state is loaded, which lacks it: core 0.16 would fail on it."""

    def forget_steps(adam: torch.optim.Optimizer) -> None:
        for state in adam.state.values():
            state.pop("step", None)

    reshardable = loaded.get("param_state_sharding_type") == "fully_reshardable"
    hooks = [adam.register_load_state_dict_post_hook(forget_steps) for adam in _torch_adams(optimizer) if reshardable]
    yield
    for hook in hooks:
        hook.remove()


def _restore_steps(optimizer: MegatronOptimizer) -> None:
    """Move the loaded step from the parameter group, where megatron-core 0.16 leaves it, to torch Adam's state."""
    for adam in _torch_adams(optimizer):
        for group in adam.param_groups:
            step = group.pop("step", None)
            for parameter in group["params"]:
                state = adam.state[parameter]
                # One tensor per parameter, because Adam increments each of them.
                state["step"] = state["step"].clone() if step is None else torch.tensor(float(step))


def _model_key(trained: TrainedObjects, index: int) -> str:
    return "model" if len(trained.model) == 1 else f"model{index}"


def _metadata(args: argparse.Namespace) -> dict[str, Any]:
    """Metadata that selects megatron-core's layout of optimizer shards."""
    metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if args.use_distributed_optimizer:
        reshardable = args.dist_ckpt_optim_fully_reshardable
        metadata["distrib_optim_sharding_type"] = "fully_reshardable" if reshardable else "dp_reshardable"
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return metadata


def _merged_metadata(args: argparse.Namespace, common: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a saved checkpoint, completed by this job's."""
    return {**_metadata(args), **(common.get("content_metadata") or {})}


def _layout(args: argparse.Namespace) -> dict[str, Any]:
    sizes = {name: getattr(args, name) for name in _LAYOUT}
    return {**sizes, "stage_to_rank": list(args.placement.stage_to_rank)}


def _random_states() -> ShardedObject:
    """All random states of this rank, keyed by its place in the layout."""
    sizes = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(),
    )
    place = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
    )
    return ShardedObject("rng_state", random_state.capture(), sizes, place, replica_id=0)
