"""Arguments that differ between versions of megatron-core are passed as upstream's own schedules pass them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.ranks import RankPool
from tests.integration.adapter.test_foreign_loop import MICROBATCHES, SEQUENCE, build_model, forward_step, samples


def alone(rank: int, test: Callable[[], None]) -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    test()


def passes_all_arguments_to_a_wrapper() -> None:
    from megatron.zero_bubble.integration.adapter.versions import supported_kwargs

    def exact(model: Any, pg_collection: Any = None) -> None: ...

    def wrapper(*args: Any, **kwargs: Any) -> None: ...

    arguments = {"pg_collection": 1, "force_all_reduce": True}
    assert supported_kwargs(exact, **arguments) == {"pg_collection": 1}
    assert supported_kwargs(wrapper, **arguments) == arguments
    assert supported_kwargs(functools.wraps(exact)(lambda **kwargs: None), **arguments) == {"pg_collection": 1}


def uses_upstreams_builder() -> None:
    from megatron.core.pipeline_parallel import schedules

    from megatron.zero_bubble.integration.adapter.versions import process_groups

    given = object()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedules, "_build_default_pg_collection", lambda: "built", raising=False)
        assert process_groups(None) == "built"
        assert process_groups(given) is given


def has_the_groups_for_expert_bias() -> None:
    from megatron.core import parallel_state

    from megatron.zero_bubble.integration.adapter.versions import process_groups

    whole = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    assert process_groups(None).tp_dp_cp is whole


def names_the_argument_of_a_model() -> None:
    """megatron-core 0.13 has none for process groups, and 0.14 another one."""
    from megatron.zero_bubble.integration.adapter import versions

    def of_0_13(config: Any, vp_stage: Any = None) -> None: ...

    def of_0_14(config: Any, vp_stage: Any = None, model_comm_pgs: Any = None) -> None: ...

    assert versions.groups_argument("groups") == {"pg_collection": "groups"}
    for model, expected in ((of_0_13, {}), (of_0_14, {"model_comm_pgs": "groups"})):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(versions, "GPTModel", model)
            assert versions.groups_argument("groups") == expected


def collects_groups_without_a_collection() -> None:
    """megatron-core 0.14 has no collection of all process groups."""
    from types import SimpleNamespace

    from megatron.core import parallel_state

    from megatron.zero_bubble.integration.adapter import versions as upstream

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upstream, "process_groups_config", SimpleNamespace(GradFinalizeProcessGroups=SimpleNamespace))
        groups = upstream.process_groups(None)
    assert set(vars(groups)) == {"pp", "tp", "cp", "embd", "pos_embd", "dp_cp"}
    assert groups.pp is parallel_state.get_pipeline_model_parallel_group()


@pytest.mark.parametrize(
    "test",
    [
        passes_all_arguments_to_a_wrapper,
        uses_upstreams_builder,
        has_the_groups_for_expert_bias,
        names_the_argument_of_a_model,
        collects_groups_without_a_collection,
    ],
    ids=lambda test: test.__name__,
)
def test_version_differences(ranks: RankPool, test: Callable[[], None]) -> None:
    ranks.run(1, alone, test)


def finalized_as_in_stock(rank: int) -> None:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_model_config

    import megatron.zero_bubble

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    model = build_model()
    config = get_model_config(model)
    finalize, calls = config.finalize_model_grads_func, []

    def wrapper(*args: Any, **kwargs: Any) -> None:
        calls.append(kwargs)
        finalize(*args, **kwargs)

    config.finalize_model_grads_func = wrapper

    def iteration() -> None:
        model.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=samples(),
            model=[model],
            num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=2,
            force_all_reduce=True,
        )

    iteration()
    megatron.zero_bubble.apply("zb-h1")
    try:
        iteration()
    finally:
        megatron.zero_bubble.revert()
    stock, ours = calls
    assert ours.keys() == stock.keys()
    assert ours["force_all_reduce"] is stock["force_all_reduce"] is True
    groups = vars(stock["pg_collection"])
    assert len(groups) >= 6
    for name, group in groups.items():
        assert getattr(ours["pg_collection"], name) is group, name


def test_finalize_model_grads_gets_stocks_arguments(ranks: RankPool) -> None:
    """Holds also for a wrapper that accepts any arguments."""
    ranks.run(2, finalized_as_in_stock)
