import argparse

import pytest

from megatron.zero_bubble.planning.job.arguments.batch_sizes import BatchSizes
from megatron.zero_bubble.planning.run_options import RunOptions

RAMP = BatchSizes(final=32, granule=4, start=8, increment=8, rampup_samples=100)


def test_constant_batch_size() -> None:
    args = argparse.Namespace(
        micro_batch_size=2,
        data_parallel_size=3,
        global_batch_size=24,
        rampup_batch_size=None,
        run=RunOptions(),
    )
    sizes = BatchSizes.from_arguments(args)
    assert [sizes.at(0), sizes.at(0) // sizes.granule, sizes.samples_after(5)] == [24, 4, 120]


def test_ramp_up_reaches_and_keeps_the_final_size() -> None:
    assert [RAMP.at(consumed) for consumed in (0, 33, 34, 67, 99, 100, 1000)] == [8, 8, 16, 24, 24, 32, 32]


@pytest.mark.parametrize("iterations", range(20))
def test_samples_after_is_the_sum_over_iterations(iterations: int) -> None:
    consumed = 0
    for _ in range(iterations):
        consumed += RAMP.at(consumed)
    assert RAMP.samples_after(iterations) == consumed


@pytest.mark.parametrize("sizes", [RAMP, BatchSizes(64, 2, 4, 20, 77), BatchSizes(12, 4, 4, 4, 8)])
def test_ramp_up_equals_megatron_cores_calculator(sizes: BatchSizes) -> None:
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

    calculator = RampupBatchsizeNumMicroBatchesCalculator(
        sizes.final, sizes.granule, 1, True, 1, sizes.start, sizes.increment, sizes.rampup_samples
    )
    for consumed in range(sizes.rampup_samples + 10):
        calculator.update(consumed, consistency_check=False)
        assert sizes.at(consumed) // sizes.granule == calculator.get(), f"after {consumed} samples"
