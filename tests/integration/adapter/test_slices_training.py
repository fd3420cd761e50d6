"""Whole iterations and runs on slices of sequences: steps, evaluations, checkpoints, failures and memory."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.helpers.faults import Fault, train_with_faults
from tests.helpers.parity import Layout, _under_each, assert_same_bits
from tests.helpers.parity import train as train_each
from tests.helpers.ranks import RankPool
from tests.helpers.slices import LONG, gradients_of
from tests.helpers.training import losses, train
from tests.integration.adapter.test_foreign_loop import MICROBATCHES, SEQUENCE, build_model, samples
from tests.integration.adapter.test_parity import BUCKETS, LLAMA, ROPE, UNTIED
from tests.integration.adapter.test_slices import EVEN, FULL_RECOMPUTE, UNEVEN

GATHER = f"--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather {BUCKETS}"
RUNS = {
    "llama, uneven": (Layout(2), f"{LLAMA} {ROPE} {UNTIED}", f"seq-zb-h1 {UNEVEN}"),
    "dp=2, distributed optimizer, both overlaps": (Layout(2, data=2), GATHER, f"seq-zb-h1 {EVEN.format(4)}"),
    "dp=2, not aligned, fused BW, fused accumulation, full recompute": (
        Layout(2, data=2),
        f"--overlap-grad-reduce --no-align-grad-reduce {BUCKETS} {FULL_RECOMPUTE} --zero-bubble-fuse-wgrad",
        f"seq-1f1b {EVEN.format(2)}",
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_five_steps_and_evaluations_equal_stock(ranks: RankPool, name: str) -> None:
    layout, options, schedule = RUNS[name]
    flags = layout.flags(3, f"{LONG} --lr 1e-3 {options}")
    results = ranks.run(layout.num_ranks, train_each, flags, [None, schedule], timeout=120)
    assert len(values(results[-1][0].losses)) > 5 * 3 * 2, "losses and counts of the steps, and evaluations"
    for stock, sliced in results:
        assert values(sliced.losses) == pytest.approx(values(stock.losses), rel=1e-6)
        assert values(sliced.grad_norms) == pytest.approx(values(stock.grad_norms), rel=1e-5)
        assert len(sliced.grad_norms) == 5 and not sliced.unmoved


def values(numbers: tuple[str, ...]) -> list[float]:
    """Return losses, those of evaluations too, or norms; ranks without the last stage have none."""
    return [float.fromhex(number.split()[-1]) for number in numbers if not number.endswith("None")]


def test_checkpoint_continues_with_and_without_slices(ranks: RankPool, tmp_path: Path) -> None:
    flags = f"--mock-data --attention-dropout 0 --hidden-dropout 0 --pipeline-model-parallel-size 2 {ROPE}"
    flags += " --global-batch-size 4"
    sliced = f"--zero-bubble-schedule seq-zb-h1 {EVEN.format(4)}"
    whole = losses(train(ranks, 2, flags, tmp_path / "whole"))
    first = losses(train(ranks, 2, f"{flags} {sliced} --save {tmp_path}/saved --exit-interval 3", tmp_path / "first"))
    for name, schedule in (("sliced", sliced), ("stock", "")):
        rest = losses(train(ranks, 2, f"{flags} {schedule} --load {tmp_path}/saved", tmp_path / name))
        assert list(first) == [1, 2, 3] and list(rest) == [4, 5, 6]
        found = [of_step[0] for of_step in (*first.values(), *rest.values())]
        assert found == pytest.approx([of_step[0] for of_step in whole.values()], rel=1e-5)


def test_rejected_steps_are_repeated_on_the_same_slices(ranks: RankPool) -> None:
    """After a rejected step, all slices read their batches again, and no history of the first forwards is left."""
    flags = f"{LONG} --zero-bubble-schedule seq-zb-h1 {UNEVEN} --clip-grad 100 --train-iters 8 {UNTIED}"
    modes = ["", "--zero-bubble-post-validation"]
    faults = [Fault(4, 1, 0, 1e6), Fault(6, 1, 2, 1e6)]
    results = ranks.run(2, train_with_faults, Layout(2).flags(3, flags), modes, faults, True, timeout=120)
    assert_same_bits(results, ["synchronous", "ahead"], 8)
    assert results[0][1].counts["repeated"] == 2, results[0][1].counts


def times_ready(rank: int, flags: str, schedule: str) -> list[int]:
    """How often every weight of the rank becomes ready for its reduction in an iteration."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Bucket

    counts: Counter[torch.nn.Parameter] = Counter()
    register = Bucket.register_grad_ready

    def counted(bucket: Any, weight: torch.nn.Parameter, *args: Any, **named: Any) -> None:
        counts[weight] += bucket.is_last_microbatch
        register(bucket, weight, *args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "register_grad_ready", counted)
        for args, _ in _under_each(f"{LONG} {flags}", [schedule]):
            gradients_of(args, None)
    return list(counts.values())


def test_only_the_last_backward_makes_weights_ready(ranks: RankPool) -> None:
    """On the last rank, the W of an earlier backward runs after the last one, when gradients may be reduced.

    It is the backward of another slice of the last microbatch or, with one slice, of another microbatch.
    """
    flags = Layout(2).flags(2, f"--overlap-grad-reduce --no-align-grad-reduce {BUCKETS}")
    for schedule in (f"seq-zb-h1 {EVEN.format(4)}", f"seq-zb-h1 {EVEN.format(1)}"):
        for counts in ranks.run(2, times_ready, flags, schedule, timeout=120):
            assert len(counts) > 10
            assert set(counts) == {1}


class Failure(NamedTuple):
    """What a failed iteration leaves, and the figures of the next one against those of a run without failure.

    Attributes:
        hooks: number of forward hooks on the model.
        pending: number of weight gradients and of keys and values that are kept.
    """

    raised: str
    hooks: int
    pending: int
    same: bool
    memory: tuple[float, float]
    peak: int


def fail_and_train(rank: int, slices: int) -> Failure:
    """Fail in the second slice of the second microbatch, on a pipeline of one rank; then run a whole iteration."""
    from megatron.core import parallel_state, tensor_parallel

    import megatron.zero_bubble

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=1, create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    config = megatron.zero_bubble.ZeroBubbleConfig(schedule="seq-zb-h1", num_slices=slices, measure_memory=True)
    pipeline = megatron.zero_bubble.apply(config)
    fails_at: int | None = slices + 2
    forwards = 0

    def step(data: Any, model: Any) -> Any:
        nonlocal forwards
        forwards += 1
        text = next(data)
        output = model(text[:, :-1], torch.arange(SEQUENCE).expand(2, -1), None, labels=text[:, 1:])
        if forwards == fails_at:
            raise ArithmeticError("no such number")
        return output, lambda losses: (losses.mean(), {"loss": losses.mean().item()})

    def run(model: Any) -> tuple[list[Any], list[torch.Tensor]]:
        model.zero_grad_buffer()
        reports = pipeline.forward_backward(
            forward_step_func=step,
            data_iterator=samples(),
            model=[model],
            num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=2,
        )
        return reports, [weight.main_grad.clone() for weight in model.parameters()]

    try:
        torch.manual_seed(7)
        model = build_model()
        with pytest.raises(ArithmeticError) as raised:
            run(model)
        hooks = sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())
        pending = pipeline.num_pending
        fails_at = None
        reports, after = run(model)
        again, expected = run(model)
        memory = pipeline.memory.gather(parallel_state.get_pipeline_model_parallel_group())
    finally:
        megatron.zero_bubble.revert()
    assert len(reports) == MICROBATCHES
    same = reports == again and all(map(torch.equal, after, expected))
    figures = memory.activation[0], memory.history[0]
    return Failure(str(raised.value), hooks, pending, same, figures, pipeline.memory.peak)


def test_failed_iteration_leaves_no_hooks_and_no_history(ranks: RankPool) -> None:
    (failure,) = ranks.run(1, fail_and_train, 4)
    assert failure.raised == "no such number"
    assert failure.hooks == failure.pending == 0
    assert failure.same


def test_memory_of_slices_adds_up(ranks: RankPool) -> None:
    """A layer of 16 float32 channels has keys and values of eight tokens of two samples."""
    (whole,), (cut,) = (ranks.run(1, fail_and_train, slices) for slices in (1, 4))
    layers = 2  # on the one rank of a pipeline of two
    assert whole.memory[1] == 0 and cut.memory[1] == layers * 2 * SEQUENCE * 2 * 16 * 4
    assert 0.8 * whole.memory[0] < cut.memory[0] < 1.1 * whole.memory[0], "attention saves half as many products"
    assert cut.memory[0] <= cut.peak < 2 * whole.peak
