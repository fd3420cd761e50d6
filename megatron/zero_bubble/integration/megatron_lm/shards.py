"""Sharded units in a Megatron-LM job: its chunks stay shards between iterations, and its optimizer steps shards.

Megatron-LM's own functions run unchanged. Those that read weights outside of the passes find them whole: the norm and
the hashes of parameters, and what a script computes besides losses in an evaluation. A checkpoint gets copies in host
memory, which are made of one chunk after the other.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron.zero_bubble.integration.adapter.shards import ShardedUnits
from megatron.zero_bubble.integration.adapter.whole_weights import copy_weights
from megatron.zero_bubble.integration.patching.loop_seams import ReaderSeams
from megatron.zero_bubble.integration.patching.replaced import Replacement, around

_Function = Callable[..., Any]


def reads_weights(args: Any) -> list[str]:
    """The options of a job with which weights stay whole between iterations, because something reads or writes them
    there that is not replaced.
    """
    is_local = getattr(args, "non_persistent_ckpt_type", None) == "local"
    reasons = {
        f"--ckpt-format {args.ckpt_format}": args.save and args.ckpt_format != "torch_dist",
        "--non-persistent-ckpt-type local": is_local,
        "--save-params-interval": getattr(args, "save_params_interval", None),
        "--qk-clip": getattr(args, "qk_clip", False),
        "--use-precision-aware-optimizer": getattr(args, "use_precision_aware_optimizer", False),
        "--optimizer-cuda-graph": getattr(args, "optimizer_cuda_graph", False),
        "--perform-rl-step": getattr(args, "perform_rl_step", False),
        "--vision-pretraining": getattr(args, "vision_pretraining", False),
    }
    return [reason for reason, holds in reasons.items() if holds]


class JobShards:
    """The chunks of a job, which are shards also between iterations.

    Args:
        units: the sharded units of its pipeline.
        args: the job's validated arguments.
    """

    def __init__(self, units: ShardedUnits, args: Any) -> None:
        self._units, self._args = units, args

    def replacements(self, seams: ReaderSeams) -> list[Replacement]:
        return [
            (seams.built, around(self._build)),
            (seams.evaluates, around(self._evaluate)),
            (seams.saves, around(self._save)),
            *((seam, around(self._read)) for seam in seams.reads),
        ]

    def _build(self, original: _Function, *args: Any, **kwargs: Any) -> Any:
        model, optimizer, scheduler = original(*args, **kwargs)  # loads the checkpoint, too
        if optimizer is not None:
            self._units.step_shards(optimizer)
        return model, optimizer, scheduler

    def _read(self, original: _Function, *args: Any, **kwargs: Any) -> Any:
        with self._units.whole_weights():
            return original(*args, **kwargs)

    def _evaluate(self, original: _Function, *args: Any, **kwargs: Any) -> Any:
        """Losses of an evaluation are computed by passes, but the script's own function may call the chunks."""
        call = inspect.signature(original).bind(*args, **kwargs)
        if (own := call.arguments.get("non_loss_data_func")) is not None:
            call.arguments["non_loss_data_func"] = functools.partial(self._read, own)
        return original(*call.args, **call.kwargs)

    def _save(self, original: _Function, args: Any, model: Any, *rest: Any, **kwargs: Any) -> Any:
        contents = original(args, model, *rest, **kwargs)
        if self._units.are_shards:  # else a checkpoint is loaded, before the first iteration
            chunks = [contents["model" if len(model) == 1 else f"model{index}"] for index in range(len(model))]
            copy_weights(self._units, chunks, on_every_replica=bool(args.ckpt_fully_parallel_save))
        return contents
