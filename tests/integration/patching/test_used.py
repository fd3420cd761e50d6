"""Every upstream name that we use is looked up when a job starts; a missing name ends the job there."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.megatron_lm import ROOT, Checkout, checkouts
from tests.helpers.ranks import RankPool

PACKAGE = ROOT / "megatron" / "zero_bubble"
# Not checked here: the commands, which require a newer version, and the CPU platform, which checks its names itself.
APART = {"engine/platforms", "cli"}
FILES = sorted(
    path for path in PACKAGE.rglob("*.py") if not APART & {str(p) for p in path.relative_to(PACKAGE).parents}
)
# A kernel that exists only with apex, and a class that exists only in versions that have its flag.
OPTIONAL = {
    "megatron.core.tensor_parallel.layers.fused_weight_gradient_mlp_cuda",
    "megatron.core.num_microbatches_calculator.StepBatchsizeNumMicroBatchesCalculator",
}
# Our variable names for upstream's objects. OF_OTHERS lists attributes that these inherit from torch and Python, or
# that belong to our own objects of the same name.
OBJECTS = ("chunk", "layout", "part", "scaler", "config", "ddp_config", "groups", "ddp", "tracker")
OF_OTHERS = {
    *("__dict__", "clear", "grad_stats_parallel_group", "items", "modules", "named_parameters", "num_in_flight"),
    "parameters",
}
OPTIONAL_ATTRIBUTES = {"delay_wgrad_compute"}


def look_ups(rank: int) -> list[str]:
    from megatron.zero_bubble.integration.patching import used
    from megatron.zero_bubble.integration.patching.seams import installed_seams

    more = (
        used.POST_VALIDATION,
        used.VOCABULARY,
        used.SHARDED_UNITS,
        used.ON_DEMAND,
        used.LAYER_PLANS,
        used.LATE_LINES,
        used.DATA,
        used.BUBBLE,
    )
    names = (*installed_seams().used, *chain.from_iterable(more))
    return [f"{name.module}.{name.name}" for name in names]


@pytest.fixture(scope="module")
def listed(ranks: RankPool) -> set[str]:
    (names,) = ranks.run(1, look_ups)
    assert len(set(names)) == len(names)
    return set(names)


def imported(tree: ast.AST) -> dict[str, str]:
    """Map local names to the upstream names that they are imported from."""
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module is not None
        if node.module.startswith(("megatron.core", "megatron.training"))
        for alias in node.names
    }


def is_module(name: str) -> bool:
    """Whether ``name`` is a module, found by its file: pytest's process must not import megatron-core."""
    for root in importlib.util.find_spec("megatron.core").submodule_search_locations or ():  # type: ignore[union-attr]
        path = Path(root).parents[1].joinpath(*name.split("."))
        if path.is_dir() or path.with_suffix(".py").is_file():
            return True
    return name == "megatron.training.global_vars"


def used_names(source: str) -> Iterator[str]:
    """Yield names imported from upstream's modules, and attributes of these modules."""
    tree = ast.parse(source)
    names = imported(tree)
    for name in names.values():
        if not is_module(name):
            yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, *rest = ast.unparse(node).split(".")
            name = ".".join([names.get(root, ""), *rest])
            if root in names and is_module(name.rpartition(".")[0]) and not is_module(name):
                yield name


def used_attributes(source: str) -> Iterator[str]:
    """Yield attributes of variables that hold upstream's objects (``OBJECTS``)."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            of = ast.unparse(node.value).rpartition(".")[2]
            if of in OBJECTS:
                yield node.attr


def test_every_used_name_is_listed(listed: set[str]) -> None:
    found = {name for path in FILES for name in used_names(path.read_text())} - OPTIONAL
    assert len(found) > 30
    covered = {".".join(name.split(".")[:end]) for name in listed for end in range(1, 9)}
    assert sorted(found - covered) == [], "add these to integration/patching/used.py"


def test_every_used_attribute_is_listed(listed: set[str]) -> None:
    files = [path for path in FILES if path.parent.name in ("adapter", "optimizer", "wgrad", "measure")]
    found = {name for path in files for name in used_attributes(path.read_text())} - OF_OTHERS - OPTIONAL_ATTRIBUTES
    assert len(found) > 20
    assert sorted(found - {name.rpartition(".")[2] for name in listed}) == [], (
        "add these to integration/patching/used.py"
    )


def test_used_names_and_attributes_are_found() -> None:
    source = """
from megatron.core import parallel_state as state
from megatron.core.pipeline_parallel.schedules import forward_step
state._hidden().rank()
chunk.no_sync
"""
    found = ["megatron.core.pipeline_parallel.schedules.forward_step", "megatron.core.parallel_state._hidden"]
    assert list(used_names(source)) == found
    assert list(used_attributes(source)) == ["no_sync"]


def rejects_each_missing_name(rank: int) -> int:
    """Remove each name in turn (of a class, only the attribute); ``apply`` must reject it."""
    import importlib

    from megatron.zero_bubble.core.errors import SeamError
    from megatron.zero_bubble.integration.patching import apply, report, used
    from megatron.zero_bubble.integration.patching.seams import installed_seams
    from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig

    of_shards = installed_seams().sharded_units
    assert set(used.SHARDED_UNITS) <= set(of_shards), "every version uses these"
    names = (*installed_seams().used, *used.POST_VALIDATION, *of_shards, *used.ON_DEMAND, *used.LAYER_PLANS)
    for name in names:
        holder, _, attribute = name.name.rpartition(".")
        with pytest.MonkeyPatch.context() as patch:
            module = importlib.import_module(name.module)
            if not holder:
                patch.delattr(module, attribute)
            else:
                others = {
                    other.name.rpartition(".")[2]: other for other in names if other.name.startswith(f"{holder}.")
                }
                of_class = getattr(module, holder)
                rest = {other: getattr(of_class, other, None) for other in others if other != attribute}
                patch.setattr(module, holder, type(holder, (), rest))
            config = ZeroBubbleConfig(schedule="zb-h2", post_validation=True)
            if name in of_shards:
                config = ZeroBubbleConfig(schedule="zero-pp", shard_weights=True)
            if name in used.ON_DEMAND:
                config = ZeroBubbleConfig(schedule="zero-pp", shard_weights=True, shard_transport="on-demand")
            if name in used.LAYER_PLANS:
                config = ZeroBubbleConfig(schedule="dualpipe-v", overlap_experts=True)
            with pytest.raises(SeamError) as caught:
                apply(config)
        assert str(caught.value) == (
            f"{name.module} has no {name.name}, which zero-bubble training uses; "
            "install a supported megatron-core (see README) or update this package"
        )
        assert report() == []
    return len(names)


def test_missing_name_is_rejected_at_the_start(ranks: RankPool) -> None:
    (count,) = ranks.run(1, rejects_each_missing_name)
    assert count > 60


def changed_arguments(rank: int) -> None:
    from megatron.core.pipeline_parallel import schedules

    from megatron.zero_bubble.core.errors import SeamError
    from megatron.zero_bubble.integration.patching import apply

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedules, "check_first_val_step", lambda first_val_step, forward_only: None)
        with pytest.raises(SeamError, match=r"check_first_val_step must accept first_val_step, forward_only, cond in"):
            apply("zb-h1")


def test_changed_arguments_are_rejected_at_the_start(ranks: RankPool) -> None:
    ranks.run(1, changed_arguments)


def missing_before_the_import(rank: int) -> None:
    from megatron.core.transformer.moe import moe_utils

    from megatron.zero_bubble.core.errors import SeamError

    ours = [
        name
        for name in sys.modules
        if name.startswith(("megatron.zero_bubble.integration.patching", "megatron.zero_bubble.run"))
    ]
    with pytest.MonkeyPatch.context() as patch:
        for name in ours:
            patch.delitem(sys.modules, name)
        patch.delattr(moe_utils, "get_moe_layer_wise_logging_tracker")
        with pytest.raises(SeamError, match="no get_moe_layer_wise_logging_tracker, which zero-bubble training uses"):
            import megatron.zero_bubble.integration.patching  # noqa: F401


def test_missing_name_in_an_import_is_rejected_in_one_sentence(ranks: RankPool) -> None:
    ranks.run(1, missing_before_the_import)


class Base:
    def __init__(self) -> None:
        self.of_base = 1


class Holder(Base):
    of_class = 1

    def __init__(self, other: Any) -> None:
        super().__init__()
        other.of_other = 1
        self.of_instance = other

    def method(self) -> None:
        self.later = 1


def finds_instance_attributes(rank: int) -> None:
    from megatron.zero_bubble.core.errors import SeamError
    from megatron.zero_bubble.integration.patching.seam import Used

    for name in ("of_class", "of_base", "of_instance", "method"):
        Used(__name__, f"Holder.{name}").check()
    for name in ("of_other", "later", "other"):
        with pytest.raises(SeamError, match=f"has no Holder.{name}, which"):
            Used(__name__, f"Holder.{name}").check()
    with pytest.raises(
        SeamError, match=r"cannot import megatron.core.gone, whose f zero-bubble training uses; install a"
    ):
        Used("megatron.core.gone", "f").check()


def test_attributes_of_instances_are_found(ranks: RankPool) -> None:
    ranks.run(1, finds_instance_attributes)


_OF_CHECKOUT = """
import sys
from megatron.zero_bubble.engine.platforms import cpu
cpu.install()
import megatron.core
assert megatron.core.__file__.startswith(sys.path[1]), megatron.core.__file__
from megatron.zero_bubble.integration.patching import used
from megatron.zero_bubble.integration.patching.seams import installed_seams
used.look_up((*used.POST_VALIDATION, *installed_seams().sharded_units, *used.ON_DEMAND, *used.BUBBLE))
"""


@pytest.mark.skipif(not checkouts(), reason="no checkout of Megatron-LM")
@pytest.mark.parametrize("checkout", checkouts(), ids=str)
def test_every_checkout_has_every_used_name(checkout: Checkout) -> None:
    path = [str(checkout.path), str(ROOT), str(ROOT / "tests/helpers/other_versions")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _OF_CHECKOUT], check=False, env=environment, stderr=subprocess.PIPE, text=True, cwd="/"
    )
    assert done.returncode == 0, done.stderr
