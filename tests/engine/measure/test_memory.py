"""Measuring a microbatch's memory must leave no hooks; test_placements.py tests the figures."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers.ranks import RankPool
from tests.integration.adapter.test_foreign_loop import MICROBATCHES, SEQUENCE, build_model, forward_step, samples


def fail_and_train(rank: int) -> tuple[str, bool, float, int]:
    """Run a forward that raises, then an iteration; return the error, whether hooks are left, and the figures."""
    from megatron.core import parallel_state, tensor_parallel

    import megatron.zero_bubble

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=1, create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    pipeline = megatron.zero_bubble.apply(megatron.zero_bubble.ZeroBubbleConfig(schedule="zb-h1", measure_memory=True))

    def run(step: Any) -> None:
        pipeline.forward_backward(
            forward_step_func=step,
            data_iterator=samples(),
            model=[model],
            num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=2,
        )

    def failing(data: Any, chunk: Any) -> Any:
        forward_step(data, chunk)
        raise ArithmeticError("no such number")

    raised = ""
    try:
        model = build_model()
        try:
            run(failing)
        except ArithmeticError as error:
            raised = str(error)
        left = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        run(forward_step)
        memory = pipeline.memory.gather(parallel_state.get_pipeline_model_parallel_group())
    finally:
        megatron.zero_bubble.revert()
    return raised, left, memory.activation[0], pipeline.memory.peak


def test_failed_forward_leaves_no_hooks(ranks: RankPool) -> None:
    ((raised, left, activation, peak),) = ranks.run(1, fail_and_train)
    assert raised == "no such number"
    assert not left
    assert 0 < activation <= peak


def test_states_are_apart_from_what_a_forward_saves() -> None:
    """The slice that begins with a state saves it for its backward; the one that has left it keeps it, too."""
    from megatron.zero_bubble.core.ir import Pass
    from megatron.zero_bubble.core.ir.passes import F
    from megatron.zero_bubble.engine.measure.memory import MemoryMeter
    from megatron.zero_bubble.engine.runtime.observer import IterationStart
    from megatron.zero_bubble.engine.runtime.saved import SavedTensors

    meter, states, kept = MemoryMeter(), [torch.ones(10)], []
    group: Any = None
    meter.begin_iteration(IterationStart(group, 1, states=lambda *_: states, saved=SavedTensors()))
    for slice_, saved in enumerate(([torch.ones(3)], [torch.ones(5), states[0]])):
        kept += [meter._count_saved(tensor.untyped_storage()) for tensor in saved]
        meter._count(Pass(0, F, 0, slice_))
    assert meter.states == {0: 4 * 10} and meter.activation == {0: 4 * (3 + 5)}
