"""Seams that split the backward of linears of TransformerEngine 2.8 or newer; no seams if it is not installed."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.engine.wgrad.store import WgradStore
from megatron.zero_bubble.engine.wgrad.transformer_engine import FUSED, Conflicts, Graphed, TransformerEngineSplit
from megatron.zero_bubble.integration.adapter.graph_slots import GraphSlots
from megatron.zero_bubble.integration.adapter.graphed_layers import graphing, inside
from megatron.zero_bubble.integration.patching.replaced import Replacement, around
from megatron.zero_bubble.integration.patching.seam import Seam
from megatron.zero_bubble.planning.job.overlaps import OF_PASSES, OF_QUEUE, switched_off

OLDEST = (2, 8)
"""2.7 has the hooks, but without fused accumulation it drops the gradient of a weight that already has a gradient."""

_SCALES_BY_COLUMNS = (2, 11)
"""The first release whose NVFP4 products take the scale of a tensor from the half that they multiply."""

_GRAPHS_OF_W = (2, 13)
"""The first release whose graphs call the hooks of data parallelism behind a W of their own."""

_MODULES = "transformer_engine.pytorch.module"
_WHY_BUILT = "is built to defer its weight gradient to W"
_PLACES = ("linear.Linear", "layernorm_linear.LayerNormLinear", "grouped_linear.GroupedLinear")

LINEARS = tuple(
    Seam(f"{_MODULES}.{module}", f"{name}.__init__", ("self", "in_features", "delay_wgrad_compute"), _WHY_BUILT)
    for module, _, name in (place.partition(".") for place in _PLACES)
)

FUSES = (2, 14)
"""The first release whose fused grouped linear has a queue."""

OPERATION = Seam(
    "transformer_engine.pytorch.ops.basic.grouped_linear",
    f"{FUSED}.__init__",
    ("self", "num_groups", "delay_wgrad_compute"),
    f"{_WHY_BUILT}, in the place of a linear of experts",
)

DELAYS = Seam(
    f"{_MODULES}._common",
    "WeightGradStore.delay_wgrad_compute",
    ("self",),
    "delays no weight gradient in a forward, an unsplit backward, or a module that multiplies by itself",
)

PUT = Seam(
    f"{_MODULES}._common",
    "WeightGradStore.put",
    ("self", "tensor_list", "func"),
    "registers a deferred weight gradient with its W",
)

DATA_PARALLEL = Seam(
    "megatron.core.distributed.distributed_data_parallel",
    "DistributedDataParallel.__init__",
    ("self", "config", "ddp_config", "module"),
    "defers the hooks of weights with deferred gradients to W",
)


class Split(NamedTuple):
    """The replacements that ``apply`` makes for TransformerEngine, and the function that ``revert`` calls."""

    replacements: list[Replacement]
    close: Callable[[], None]


def split(store: WgradStore, say: Callable[[str], None], graphed: Seam, slots: GraphSlots) -> Split:
    """Replacements that split the backward of the installed TransformerEngine's linears.

    Args:
        store: the store of deferred gradients.
        say: prints which modules are not split.
        graphed: the function that captures layers as CUDA graphs.
        slots: the slots of graphs.

    If TransformerEngine is too old, its linears raise an error when they are built; the rest of it is not changed.
    """
    version = _version()
    if version is None:
        return Split([], lambda: None)
    release = tuple(int(part) for part in re.findall("[0-9]+", version)[:2])
    if release < OLDEST:
        seams = (Seam(seam.module, seam.name, ("self",), "raises an error: too old") for seam in LINEARS[:2])
        return Split([(seam, around(functools.partial(_refuse, version))) for seam in seams], lambda: None)
    conflicts = Conflicts(OF_QUEUE, OF_PASSES, switched_off)
    engine = TransformerEngineSplit(
        store, release < _SCALES_BY_COLUMNS, say, conflicts, Graphed(inside, release >= _GRAPHS_OF_W)
    )
    linears: list[Replacement] = [(seam, engine.build) for seam in LINEARS]
    if release >= FUSES:
        linears.append((OPERATION, engine.build_operation))
    if graphed.exists():  # where megatron-core finds that TransformerEngine has it
        linears.append((graphed, lambda original: graphing(original, slots, engine)))
    return Split([*linears, (DELAYS, engine.delays), (PUT, engine.put), (DATA_PARALLEL, engine.wrap)], engine.close)


def _version() -> str | None:
    """Version of the TransformerEngine that megatron-core uses; None if it uses none."""
    if find_spec("transformer_engine") is None:
        return None
    try:
        importlib.import_module("transformer_engine.pytorch")
    except ImportError:  # megatron-core then does without it, too
        return None
    return str(importlib.import_module("transformer_engine").__version__)


def _refuse(version: str, *_args: Any, **_options: Any) -> None:
    raise UserError(
        f"zero-bubble schedules need TransformerEngine {'.'.join(map(str, OLDEST))} or newer, which can defer "
        f"weight gradients to W; got {version}; install a newer version, or train with --transformer-impl local"
    )
