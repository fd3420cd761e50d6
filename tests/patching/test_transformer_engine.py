"""TransformerEngine's seams come and go with the others, and only with a TransformerEngine that has them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest

from tests.helpers import engine
from tests.helpers.ranks import RankPool

LINEARS = (engine.Linear, engine.LayerNormLinear, engine.GroupedLinear)
MODULES = "transformer_engine.pytorch.module"
REPLACED = [
    f"{MODULES}.linear.Linear.__init__",
    f"{MODULES}.layernorm_linear.LayerNormLinear.__init__",
    f"{MODULES}.grouped_linear.GroupedLinear.__init__",
    f"{MODULES}._common.WeightGradStore.put",
    "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel.__init__",
]


def found() -> list[Any]:
    from megatron.core.distributed import DistributedDataParallel

    return [
        *(vars(linear)["__init__"] for linear in LINEARS),
        vars(engine.WeightGradStore)["put"],
        vars(DistributedDataParallel)["__init__"],
    ]


def on_a_rank(rank: int, test: Callable[[], None]) -> None:
    import megatron.zero_bubble.patching  # noqa: F401  (megatron-core, before there is a TransformerEngine)

    test()


def run(ranks: RankPool, test: Callable[[], None]) -> None:
    ranks.run(1, on_a_rank, test)


def applies_and_reverts() -> None:
    from megatron.zero_bubble.job.config import ZeroBubbleConfig
    from megatron.zero_bubble.patching import apply, report, revert

    with engine.installed():
        before = found()
        apply(ZeroBubbleConfig(schedule="zb-h1"))
        try:
            assert not any(now is then for now, then in zip(found(), before, strict=True))
            assert [line.partition(":")[0] for line in report()][-5:] == REPLACED
            assert engine.LayerNormLinear(2, 3).wgrad_store.delay_wgrad_compute()
        finally:
            revert()
        assert all(now is then for now, then in zip(found(), before, strict=True))
        assert not engine.LayerNormLinear(2, 3).wgrad_store.delay_wgrad_compute()


def test_apply_and_revert(ranks: RankPool) -> None:
    run(ranks, applies_and_reverts)


def touches_nothing(is_broken: bool) -> None:
    """megatron-core does without one that cannot be imported, too."""
    from megatron.zero_bubble.job.config import ZeroBubbleConfig
    from megatron.zero_bubble.patching import apply, report, revert

    before = found()
    with engine.installed() if is_broken else nullcontext(), pytest.MonkeyPatch.context() as patch:
        if is_broken:
            patch.setitem(sys.modules, "transformer_engine.pytorch", None)
        apply(ZeroBubbleConfig(schedule="zb-h1"))
        try:
            assert len(report()) == 3
            assert all(now is then for now, then in zip(found(), before, strict=True))
        finally:
            revert()


@pytest.mark.parametrize("is_broken", [False, True])
def test_without_transformer_engine(ranks: RankPool, is_broken: bool) -> None:
    run(ranks, partial(touches_nothing, is_broken))


def refuses_when_built(version: str) -> None:
    """An old one may be there for something else: only its linears are refused."""
    from megatron.zero_bubble.errors import UserError
    from megatron.zero_bubble.job.config import ZeroBubbleConfig
    from megatron.zero_bubble.patching import apply, revert

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
def test_an_old_version(ranks: RankPool, version: str) -> None:
    run(ranks, partial(refuses_when_built, version))


def accepts(version: str) -> None:
    from megatron.zero_bubble.job.config import ZeroBubbleConfig
    from megatron.zero_bubble.patching import apply, report, revert

    with engine.installed(version):
        apply(ZeroBubbleConfig(schedule="zb-h1"))
        assert len(report()) == 3 + len(REPLACED)
        revert()


@pytest.mark.parametrize("version", ["2.8.0", "2.11.0+c188b533", "2.20.2", "3.0.0.dev0"])
def test_a_new_version(ranks: RankPool, version: str) -> None:
    run(ranks, partial(accepts, version))


def refuses_changed_seams() -> None:
    from megatron.zero_bubble.errors import SeamError
    from megatron.zero_bubble.job.config import ZeroBubbleConfig
    from megatron.zero_bubble.patching import apply, report

    with engine.installed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.WeightGradStore, "put", lambda self, operands: None)
        before = found()
        with pytest.raises(SeamError, match=r"_common\.WeightGradStore\.put must accept self, tensor_list, func in"):
            apply(ZeroBubbleConfig(schedule="zb-h1"))
        patch.delattr(engine.LayerNormLinear, "__init__")
        with pytest.raises(SeamError, match=r"layernorm_linear has no LayerNormLinear\.__init__, which"):
            apply(ZeroBubbleConfig(schedule="zb-h1"))
        assert report() == [] and vars(engine.Linear)["__init__"] is before[0]


def test_a_changed_seam(ranks: RankPool) -> None:
    run(ranks, refuses_changed_seams)
