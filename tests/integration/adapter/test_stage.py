"""The scales of auxiliary losses, which are set again when an optimizer step has changed the loss scale."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.ranks import RankPool

NUM_MICROBATCHES, CP_SIZE = 4, 2


def scales() -> tuple[float, float]:
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    return tuple(scaler.main_loss_backward_scale.item() for scaler in (MoEAuxLossAutoScaler, MTPLossAutoScaler))  # type: ignore[return-value]


def scaled(_rank: int, per_token: bool, has_functions: bool) -> list[tuple[float, float]]:
    """The scales that a forward sets, and those that we set before it and, for half a sequence, after it.

    With ``has_functions``, upstream is that of megatron-core 0.20, which asks the configuration for other scales.
    """
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    from megatron.zero_bubble.integration.adapter.stage import StepArguments

    calculate = schedules.forward_step_calc_loss

    def newer(model: Any, output: torch.Tensor, loss: Any, config: Any, *more: Any) -> Any:
        result = calculate(model, output, loss, config, *more)
        parts = 1 if config.calculate_per_token_loss else NUM_MICROBATCHES
        MoEAuxLossAutoScaler.set_loss_scale(config.moe_grad_scale_func() / parts)
        MTPLossAutoScaler.set_loss_scale(config.mtp_grad_scale_func() / parts)
        return result

    class Timers:
        def __call__(self, *_: Any) -> Any:
            raise AssertionError("no forward is timed")

    config = SimpleNamespace(
        grad_scale_func=lambda loss: loss * 8,
        calculate_per_token_loss=per_token,
        num_moe_experts=4,
        mtp_num_layers=1,
        timers=Timers(),
        moe_grad_scale_func=lambda: torch.tensor([2.0]),
        mtp_grad_scale_func=lambda: torch.tensor([3.0]),
    )
    step = StepArguments(None, NUM_MICROBATCHES, config, CP_SIZE, False, False, None)  # type: ignore[arg-type]
    device = torch.device("cpu")
    with pytest.MonkeyPatch.context() as patch:
        if has_functions:
            patch.setattr(schedules, "forward_step_calc_loss", newer)
        step.scale_auxiliary_losses(device)
        found = [scales()]
        config.timers = None
        more: Any = (None, False, NUM_MICROBATCHES, [], CP_SIZE, False)
        schedules.forward_step_calc_loss(None, torch.ones(1), None, config, *more)
        found.append(scales())
        step.scale_auxiliary_losses(device, 0.5)
        found.append(scales())
    return found


@pytest.fixture
def unscaled(ranks: RankPool) -> Iterator[None]:
    yield
    ranks.run(1, forget)


def forget(_rank: int) -> None:
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    MoEAuxLossAutoScaler.main_loss_backward_scale = MTPLossAutoScaler.main_loss_backward_scale = None


@pytest.mark.usefixtures("unscaled")
@pytest.mark.parametrize("has_functions", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
def test_scales_are_those_of_a_forward(ranks: RankPool, per_token: bool, has_functions: bool) -> None:
    [(ours, of_forward, of_slice)] = ranks.run(1, scaled, per_token, has_functions)
    assert ours == of_forward
    assert of_slice == (of_forward if per_token else (of_forward[0] / 2, of_forward[1]))
    if has_functions:
        assert ours == ((2.0, 3.0) if per_token else (0.5, 0.75))
