"""Forwards that run twice must have the same side effects as forwards that run once."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers.ranks import RankPool


class Counting(torch.nn.Module):
    """A module whose forward adds to a buffer and to every sum that megatron-core keeps for its log."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("absent", None)

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        from megatron.core.transformer import multi_token_prediction
        from megatron.core.transformer.moe.moe_utils import save_to_aux_losses_tracker

        prediction: Any = multi_token_prediction.MTPLossLoggingHelper
        self.seen += sample
        loss = torch.rand(()) * sample.sum()
        save_to_aux_losses_tracker("balance", loss, 1, 2)
        if hasattr(prediction, "save_metrics_to_tracker"):
            prediction.save_metrics_to_tracker(loss, torch.tensor(3.0), torch.tensor(4.0), 0, 2)
        else:
            prediction.save_loss_to_tracker(loss, 0, 2)
        return loss


def once_and_twice(rank: int, before: int) -> tuple[dict[Any, list[float]], dict[Any, list[float]]]:
    """Return the side effects of iterations without repetition, and with the last one's first two forwards repeated.

    Args:
        before: the number of iterations before the last.
    """
    from megatron.zero_bubble.engine.optimizer.log_sums import sums_for_the_log
    from megatron.zero_bubble.engine.optimizer.replay import Replay

    def run(wrong: bool) -> dict[Any, list[float]]:
        for value in sums_for_the_log().values():
            value.zero_()
        torch.manual_seed(1)
        model, samples = Counting(), (torch.full((3,), float(number)) for number in range(1, 100))
        for iteration in range(before + 1):
            replay = Replay([torch.nn.Sequential(model)], [samples])
            if wrong and iteration == before:
                for _ in range(2):
                    model(next(replay.iterators[0]))
                replay.rewind()
            else:
                replay.confirm()
            for _ in range(4):
                model(next(replay.iterators[0]))
        return {("model", "seen"): model.seen.tolist()} | {key: v.tolist() for key, v in sums_for_the_log().items()}

    wrong = run(wrong=True)  # first, so that with before=0 the sums are created by forwards that are repeated
    return run(wrong=False), wrong


def test_repeated_forwards_count_once(ranks: RankPool) -> None:
    """Covers buffers, auxiliary losses of experts and losses of multi-token prediction, existing or newly created."""
    for before in (0, 2):
        ((once, twice),) = ranks.run(1, once_and_twice, before)
        assert once == twice
        assert len(once) >= 3 and all(any(values) for values in once.values()), once


def changed_batches(_rank: int) -> list[Any]:
    """Return what a consumer that changes its batches gets, at first and again."""
    from megatron.zero_bubble.engine.optimizer.replay import Replay

    batches = iter([{"tokens": [1, 2, 3, 4]}, {"tokens": [5, 6, 7, 8]}])

    def taken() -> Any:
        batch = next(replay.iterators[0])
        batch["tokens"] = batch["tokens"][:2]
        return batch["tokens"]

    replay = Replay([torch.nn.Linear(1, 1)], [batches])
    first = taken()
    replay.rewind()
    return [first, taken(), taken()]


def test_batches_that_a_consumer_changed_are_whole_again(ranks: RankPool) -> None:
    """Megatron-LM slices a batch for context parallelism in place."""
    assert ranks.run(1, changed_batches) == [[[1, 2], [1, 2], [5, 6]]]


def rerun_machine(_rank: int) -> tuple[Any, Any, Any]:
    from megatron.core import rerun_state_machine as machines

    from megatron.zero_bubble.engine.optimizer.replay import Replay

    machines.initialize_rerun_state_machine(mode=machines.RerunMode.VALIDATE_RESULTS)
    machine = machines.get_rerun_state_machine()
    try:
        machine.state, machine.first_iteration_complete = machines.RerunState.INITIAL_RUN, True

        def forward(loss: float) -> None:
            machine.validate_result(torch.tensor(loss), torch.isnan, "loss is NaN")
            machine.is_unexpectedly_large(torch.tensor(loss), threshold=10, context="loss")

        def seen() -> Any:
            return dict(machine.validation_counts), machine.rerun_requested, dict(machine.max_values)

        forward(1.0)
        before = seen()
        replay = Replay([torch.nn.Linear(1, 1)], [None])
        forward(float("nan"))
        forward(100.0)
        wrong = seen()
        replay.rewind()
        return before, wrong, seen()
    finally:
        machines.destroy_rerun_state_machine()


def test_checks_of_losses_in_repeated_forwards_count_once(ranks: RankPool) -> None:
    """A NaN of a forward on wrong weights must not request that Megatron runs the iteration again."""
    ((before, wrong, after),) = ranks.run(1, rerun_machine)
    assert after == before != wrong
    assert wrong[1] and not after[1]
