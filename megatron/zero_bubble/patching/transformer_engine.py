"""The seams of TransformerEngine 2.8 and newer, for the split of its linears; nothing where it is not installed."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.patching.seam import Seam
from megatron.zero_bubble.wgrad.store import WgradStore
from megatron.zero_bubble.wgrad.transformer_engine import TransformerEngineSplit

OLDEST = (2, 8)
"""2.7 has the hooks, but drops the gradient of a weight that is not accumulated in fusion, where it has one already."""

_MODULES = "transformer_engine.pytorch.module"
_WHY_BUILT = "is built to leave its weight gradient to W"
_PLACES = ("linear.Linear", "layernorm_linear.LayerNormLinear", "grouped_linear.GroupedLinear")

LINEARS = tuple(
    Seam(f"{_MODULES}.{module}", f"{name}.__init__", ("self", "in_features", "delay_wgrad_compute"), _WHY_BUILT)
    for module, _, name in (place.partition(".") for place in _PLACES)
)

PUT = Seam(
    f"{_MODULES}._common",
    "WeightGradStore.put",
    ("self", "tensor_list", "func"),
    "tells the store of W's that a weight gradient waits",
)

DATA_PARALLEL = Seam(
    "megatron.core.distributed.distributed_data_parallel",
    "DistributedDataParallel.__init__",
    ("self", "config", "ddp_config", "module"),
    "leaves the hooks of weights whose gradient waits to their W",
)


class Split(NamedTuple):
    """What ``apply`` replaces for TransformerEngine, and what it calls when it is taken back."""

    replacements: list[tuple[Seam, Callable[[Callable[..., Any]], Callable[..., Any]]]]
    close: Callable[[], None]


def split(store: WgradStore) -> Split:
    """The split of the linears of the TransformerEngine that is installed. One that is too old is left as it is, but
    for its linears: they refuse to be built.
    """
    version = _version()
    if version is None:
        return Split([], lambda: None)
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST:
        seams = (Seam(seam.module, seam.name, ("self",), "refuses to be built: too old") for seam in LINEARS[:2])
        return Split([(seam, functools.partial(_refused, version)) for seam in seams], lambda: None)
    engine = TransformerEngineSplit(store)
    linears = [(seam, engine.build) for seam in LINEARS]
    return Split([*linears, (PUT, engine.put), (DATA_PARALLEL, engine.wrap)], engine.close)


def _version() -> str | None:
    """Of the TransformerEngine that megatron-core uses; None where there is none."""
    if find_spec("transformer_engine") is None:
        return None
    try:
        importlib.import_module("transformer_engine.pytorch")
    except ImportError:  # megatron-core then goes without, too
        return None
    return str(importlib.import_module("transformer_engine").__version__)


def _refused(version: str, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(module: Any, *args: Any, **options: Any) -> None:
        raise UserError(
            f"zero-bubble schedules need TransformerEngine {'.'.join(map(str, OLDEST))} or newer, whose weight "
            f"gradients can wait for W; got {version}; install a newer one, or train with --transformer-impl local"
        )

    return init
