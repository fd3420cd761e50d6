"""TransformerEngine's seams are applied and reverted with the others, if a supported version is installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import engine
from tests.helpers.graphed_engine import make_graphed_callables
from tests.helpers.ranks import RankPool

LINEARS = (engine.Linear, engine.LayerNormLinear, engine.GroupedLinear)
MODULES = "transformer_engine.pytorch.module"
REPLACED = [
    f"{MODULES}.linear.Linear.__init__",
    f"{MODULES}.layernorm_linear.LayerNormLinear.__init__",
    f"{MODULES}.grouped_linear.GroupedLinear.__init__",
    f"{MODULES}._common.WeightGradStore.delay_wgrad_compute",
    f"{MODULES}._common.WeightGradStore.put",
    "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel.__init__",
]


def found() -> list[Any]:
    from megatron.core.distributed import DistributedDataParallel

    return [
        *(vars(linear)["__init__"] for linear in LINEARS),
        vars(engine.WeightGradStore)["delay_wgrad_compute"],
        vars(engine.WeightGradStore)["put"],
        vars(DistributedDataParallel)["__init__"],
    ]


def on_a_rank(rank: int, test: Callable[[], None]) -> None:
    import megatron.zero_bubble.integration.patching  # noqa: F401  (imports megatron-core before the fake TransformerEngine exists)

    test()


def run(ranks: RankPool, test: Callable[[], None]) -> None:
    ranks.run(1, on_a_rank, test)


def applies_and_reverts() -> None:
    from megatron.zero_bubble.integration.patching import apply, report, revert
    from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig

    with engine.installed():
        before = found()
        apply(ZeroBubbleConfig(schedule="zb-h1"))
        try:
            assert not any(now is then for now, then in zip(found(), before, strict=True))
            assert [line.partition(":")[0] for line in report()][-6:] == REPLACED
            assert engine.LayerNormLinear(2, 3).wgrad_store.delay_wgrad_compute()
        finally:
            revert()
        assert all(now is then for now, then in zip(found(), before, strict=True))
        assert not engine.LayerNormLinear(2, 3).wgrad_store.delay_wgrad_compute()


def test_revert_restores_transformer_engine(ranks: RankPool) -> None:
    run(ranks, applies_and_reverts)


def replaces_the_capture_of_graphs() -> None:
    """Where megatron-core has found it in TransformerEngine; its helper calls it by this name."""
    from megatron.zero_bubble.integration.patching import apply, report, revert
    from megatron.zero_bubble.integration.patching.seams import installed_seams
    from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig

    seam = installed_seams().graphed
    with engine.installed("2.13.0"), pytest.MonkeyPatch.context() as patch:
        module = importlib.import_module(seam.module)
        patch.setattr(module, seam.name, make_graphed_callables, raising=False)
        apply(ZeroBubbleConfig(schedule="zb-h1"))
        try:
            assert f"{seam.module}.{seam.name}" in [line.partition(":")[0] for line in report()]
            assert getattr(module, seam.name) is not make_graphed_callables
        finally:
            revert()
        assert getattr(module, seam.name) is make_graphed_callables
    if seam.module.startswith("megatron.core"):
        source = Path(str(module.__file__)).read_text(encoding="utf-8")
        assert f"graphs = {seam.name}(" in source, "the helper calls it"


def test_capture_of_graphs_is_replaced(ranks: RankPool) -> None:
    run(ranks, replaces_the_capture_of_graphs)


def applies_without_transformer_engine(is_broken: bool) -> None:
    """Like megatron-core, treat a TransformerEngine that fails to import as absent."""
    from megatron.zero_bubble.integration.patching import apply, report, revert
    from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig

    before = found()
    with engine.installed() if is_broken else nullcontext(), pytest.MonkeyPatch.context() as patch:
        if is_broken:
            patch.setitem(sys.modules, "transformer_engine.pytorch", None)
        apply(ZeroBubbleConfig(schedule="zb-h1"))
        try:
            assert len(report()) == 6
            assert all(now is then for now, then in zip(found(), before, strict=True))
        finally:
            revert()


@pytest.mark.parametrize("is_broken", [False, True])
def test_apply_without_transformer_engine(ranks: RankPool, is_broken: bool) -> None:
    run(ranks, partial(applies_without_transformer_engine, is_broken))


def rejects_when_built(version: str) -> None:
    """An old version may be installed for other purposes: only building its linears is rejected."""
    from megatron.zero_bubble.core.errors import UserError
    from megatron.zero_bubble.integration.patching import apply, revert
    from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig

    with engine.installed(version):
        before = found()
        apply(ZeroBubbleConfig(schedule="zb-h1"))
        try:
            for linear in (engine.Linear, engine.LayerNormLinear):
                with pytest.raises(UserError, match=rf"TransformerEngine 2\.8 or newer, .* got {version}; install"):
                    linear(2, 3)
        finally:
            revert()
        assert all(now is then for now, then in zip(found(), before, strict=True))
        engine.Linear(2, 3)


@pytest.mark.parametrize("version", ["1.13.0", "2.7.0"])
def test_linears_of_old_versions_are_rejected(ranks: RankPool, version: str) -> None:
    run(ranks, partial(rejects_when_built, version))


def accepts(version: str, more: list[str]) -> None:
    from megatron.zero_bubble.integration.patching import apply, report, revert
    from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig

    with engine.installed(version):
        apply(ZeroBubbleConfig(schedule="zb-h1"))
        replaced = [*REPLACED[:3], *more, *REPLACED[3:]]
        assert [line.partition(":")[0] for line in report()][6:] == replaced
        revert()


@pytest.mark.parametrize("version", ["2.8.0", "2.11.0+c188b533"])
def test_new_versions_are_accepted(ranks: RankPool, version: str) -> None:
    run(ranks, partial(accepts, version, []))


@pytest.mark.parametrize("version", ["2.14.0", "2.20.2", "3.0.0.dev0"])
def test_operations_of_newer_versions_are_split_too(ranks: RankPool, version: str) -> None:
    operation = "transformer_engine.pytorch.ops.basic.grouped_linear.GroupedLinear.__init__"
    run(ranks, partial(accepts, version, [operation]))


def rejects_changed_seams() -> None:
    from megatron.zero_bubble.core.errors import SeamError
    from megatron.zero_bubble.integration.patching import apply, report
    from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig

    with engine.installed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.WeightGradStore, "put", lambda self, operands: None)
        before = found()
        with pytest.raises(SeamError, match=r"_common\.WeightGradStore\.put must accept self, tensor_list, func in"):
            apply(ZeroBubbleConfig(schedule="zb-h1"))
        patch.delattr(engine.LayerNormLinear, "__init__")
        with pytest.raises(SeamError, match=r"layernorm_linear has no LayerNormLinear\.__init__, which"):
            apply(ZeroBubbleConfig(schedule="zb-h1"))
        assert report() == [] and vars(engine.Linear)["__init__"] is before[0]


def test_changed_transformer_engine_seam_is_rejected(ranks: RankPool) -> None:
    run(ranks, rejects_changed_seams)
