"""Tests of patches: applied and reverted as a whole, reported, and rejected for unknown seams."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron.zero_bubble import PassCosts, build, simulate
from megatron.zero_bubble.core.formats.plan import plan_to_json
from tests.helpers.ranks import RankPool

SCHEDULES = "megatron.core.pipeline_parallel.schedules"
LAYERS = "megatron.core.tensor_parallel.layers"
SCHEDULE = f"{SCHEDULES}.forward_backward_pipelining_without_interleaving"
SCHEDULE_OF_CHUNKS = f"{SCHEDULES}.forward_backward_pipelining_with_interleaving"
LINEAR = f"{LAYERS}.linear_with_grad_accumulation_and_async_allreduce"
GRADIENTS, REDUCED = "torch.autograd.grad", "megatron.core.tensor_parallel.mappings._reduce"
LAYER_GRAPHS = "megatron.core.transformer.cuda_graphs.CudaGraphManager.__call__"


def names() -> dict[str, dict[str, int]]:
    """Return the identity of every name in the patched modules."""
    return {
        module: {name: id(value) for name, value in vars(sys.modules[module]).items()} for module in (SCHEDULES, LAYERS)
    }


def changed(before: dict[str, dict[str, int]]) -> set[str]:
    after = names()
    return {
        f"{module}.{name}" for module, found in before.items() for name in found if found[name] != after[module][name]
    }


def on_a_rank(rank: int, test: Any) -> None:
    import megatron.zero_bubble.integration.patching  # noqa: F401  (imports the modules that it patches)

    test()


def run(ranks: RankPool, test: Any) -> None:
    """Run ``test`` on a rank, because pytest's process must not import megatron-core."""
    ranks.run(1, on_a_rank, test)


def applies_and_reverts() -> None:
    from megatron.core.pipeline_parallel import schedules

    from megatron.zero_bubble.integration.patching import apply, report, revert
    from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig

    before = names()
    assert report() == []
    pipeline = apply(ZeroBubbleConfig(schedule="zb-h1"))
    try:
        assert changed(before) == {SCHEDULE, SCHEDULE_OF_CHUNKS, LINEAR}
        assert schedules.get_forward_backward_func(2, None) == pipeline.forward_backward
        assert [line.partition(":")[0] for line in report()] == [
            SCHEDULE,
            SCHEDULE_OF_CHUNKS,
            LINEAR,
            GRADIENTS,
            REDUCED,
            LAYER_GRAPHS,
        ]
    finally:
        revert()
    assert changed(before) == set()
    assert report() == []
    revert()


def test_revert_restores_every_patched_name(ranks: RankPool) -> None:
    run(ranks, applies_and_reverts)


def rejects_second_apply() -> None:
    from megatron.zero_bubble.core.errors import PatchError
    from megatron.zero_bubble.integration.patching import apply, revert
    from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig

    before = names()
    apply(ZeroBubbleConfig(schedule="zb-h1"))
    patched = changed(before)
    try:
        with pytest.raises(PatchError, match=r"already patched; call revert\(\) before"):
            apply(ZeroBubbleConfig(schedule="zb-h2"))
        assert changed(before) == patched
    finally:
        revert()
    assert changed(before) == set()
    apply(ZeroBubbleConfig(schedule="zb-h2"))
    revert()


def test_second_apply_is_rejected(ranks: RankPool) -> None:
    run(ranks, rejects_second_apply)


def rejects_unknown_version() -> None:
    import megatron.core

    from megatron.zero_bubble.core.errors import SeamError
    from megatron.zero_bubble.integration.patching import apply
    from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig

    before, version = names(), megatron.core.__version__
    megatron.core.__version__ = "0.99.1"
    try:
        with pytest.raises(SeamError, match=r"supports megatron-core 0\.13, .*0\.20; this is 0\.99\.1; install"):
            apply(ZeroBubbleConfig(schedule="zb-h1"))
    finally:
        megatron.core.__version__ = version
    assert changed(before) == set()


def test_unknown_version_is_rejected(ranks: RankPool) -> None:
    run(ranks, rejects_unknown_version)


def rejects_changed_seams() -> None:
    """If the second seam is unknown, the first must not stay replaced."""
    from megatron.core.tensor_parallel import layers

    from megatron.zero_bubble.core.errors import SeamError
    from megatron.zero_bubble.integration.patching import apply
    from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig

    name = LINEAR.rpartition(".")[2]
    original = getattr(layers, name)
    missing = object()
    for stand_in, sentence in (
        (lambda weight, input: None, rf"{name} must accept input, weight, bias, .* it has \(weight, input\)"),
        (missing, f"layers has no {name}, which zero-bubble training replaces"),
    ):
        delattr(layers, name) if stand_in is missing else setattr(layers, name, stand_in)
        before = names()
        try:
            with pytest.raises(SeamError, match=sentence):
                apply(ZeroBubbleConfig(schedule="zb-h1"))
            assert changed(before) == set()
        finally:
            setattr(layers, name, original)


def test_changed_seam_is_rejected(ranks: RankPool) -> None:
    run(ranks, rejects_changed_seams)


def rejects_unknown_schedule() -> None:
    from megatron.zero_bubble.integration.patching import apply, report
    from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig

    with pytest.raises(ValueError, match="unknown schedule 'zb-h3'; choose one of .*zb-h1"):
        apply(ZeroBubbleConfig(schedule="zb-h3"))
    assert report() == []


def test_unknown_schedule_is_rejected(ranks: RankPool) -> None:
    run(ranks, rejects_unknown_schedule)


def accepts_file_on_one_rank(file: str) -> None:
    from megatron.zero_bubble.integration.patching import apply, report, revert
    from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig

    apply(ZeroBubbleConfig(schedule_file=file))
    try:
        assert any("is_pipeline_last_stage" in line for line in report()), (
            "the last stage of a V is not on the last rank"
        )
    finally:
        revert()


def test_apply_accepts_a_schedule_file_for_four_ranks(ranks: RankPool, tmp_path: Path) -> None:
    schedule = build("zb-v", num_ranks=4, num_microbatches=4)
    file = tmp_path / "plan.json"
    file.write_text(plan_to_json(simulate(schedule, PassCosts.uniform(schedule.placement, 1.0, 1.0, 1.0))))
    run(ranks, partial(accepts_file_on_one_rank, str(file)))


def accepts_more_parameters() -> None:
    from megatron.zero_bubble.core.errors import SeamError
    from megatron.zero_bubble.integration.patching.seam import Seam

    module = ModuleType("upstream")
    sys.modules["upstream"] = module
    try:
        module.f = lambda a, new, b, newer=1: None  # type: ignore[attr-defined]
        assert Seam("upstream", "f", ("a", "b"), "").resolve() == (module, module.f)
        with pytest.raises(SeamError, match=r"upstream\.f must accept b, a in this order; it has \(a, new, b, newer\)"):
            Seam("upstream", "f", ("b", "a"), "").resolve()
    finally:
        del sys.modules["upstream"]


def test_seam_accepts_additional_parameters(ranks: RankPool) -> None:
    run(ranks, accepts_more_parameters)
