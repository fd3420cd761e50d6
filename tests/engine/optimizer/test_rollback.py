"""Tests of undoing a step of a torch optimizer: exactly, or by inverting AdamW."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.engine.optimizer.rollback import InverseAdamRollback, SnapshotRollback
from megatron.zero_bubble.engine.optimizer.step_options import StepOptions


class CountingSGD(torch.optim.SGD):
    """Counts its steps in the parameter group, as TransformerEngine's Adam does."""

    def step(self, closure: None = None) -> None:
        super().step()
        group = self.param_groups[0]
        group["step"] = group.get("step", 0) + 1


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1),
    "adamw, late betas": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.9, 0.999)),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "counting": lambda p: CountingSGD(p, lr=1e-2),
}
ADAM = ["adamw", "adamw, late betas"]


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((40, 30), (30,), (7, 5, 3))]


def step(optimizer: torch.optim.Optimizer, weights: list[torch.nn.Parameter], seed: int, scale: float = 1.0) -> None:
    """Take a step with random gradients, a third of which are zero."""
    generator = torch.Generator().manual_seed(seed)
    for weight in weights:
        grad = scale * torch.randn(weight.shape, generator=generator)
        weight.grad = grad * (torch.rand(weight.shape, generator=generator) > 1 / 3)
    optimizer.step()


def contents(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters, then every state by name, then the options."""
    group = optimizer.param_groups[0]
    found = [weight.detach().clone() for weight in group["params"]]
    for weight in group["params"]:
        found += [torch.as_tensor(deepcopy(value)) for _, value in sorted(optimizer.state.get(weight, {}).items())]
    return [*found, torch.tensor([float(v) for k, v in group.items() if k in ("lr", "weight_decay", "step")])]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps_before", [0, 1, 5])
def test_exact_restores_every_bit(name: str, steps_before: int) -> None:
    weights = parameters()
    optimizer = OPTIMIZERS[name](weights)
    for seed in range(steps_before):
        step(optimizer, weights, seed)
    before = contents(optimizer)
    rollback, options = SnapshotRollback([optimizer]), StepOptions([optimizer])
    options.keep()
    rollback.keep()
    num_elements = sum(weight.numel() for weight in weights)
    assert rollback.num_bytes >= 4 * num_elements
    step(optimizer, weights, 100, scale=1e6)
    options.stepped()
    optimizer.param_groups[0]["lr"] = 0.5
    with options.of_step():
        rollback.undo()
        after = contents(optimizer)
    assert len(after) == len(before) and all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert rollback.num_bytes == 0
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_repeated_step_uses_its_own_options_and_the_next_the_new_ones() -> None:
    """Holds for options that the job has changed, added or removed since; the optimizer counts one step."""
    weights = parameters()
    optimizer = OPTIMIZERS["counting"](weights)
    (group,) = optimizer.param_groups
    scale = torch.tensor(2.0)
    group |= {"dropped": 1, "scale": scale, "list": [1]}
    step(optimizer, weights, 0)
    options = StepOptions([optimizer])
    options.keep()
    step(optimizer, weights, 1)
    options.stepped()
    group |= {"lr": 0.5, "added": 2}
    scale.fill_(3.0)
    group["list"].append(2)
    del group["dropped"]
    with options.of_step():
        assert (group["lr"], group["step"], group["dropped"], scale.item(), group["list"]) == (1e-2, 1, 1, 2.0, [1])
        assert "added" not in group
        step(optimizer, weights, 1)
    assert (group["lr"], group["step"], group["added"], scale.item(), group["list"]) == (0.5, 2, 2, 3.0, [1, 2])
    assert "dropped" not in group and group["scale"] is scale


def test_forget_releases_the_snapshot() -> None:
    weights = parameters()
    rollback = SnapshotRollback([OPTIMIZERS["adamw"](weights)])
    rollback.keep()
    rollback.forget()
    assert rollback.num_bytes == 0


@pytest.mark.parametrize("name", ADAM)
@pytest.mark.parametrize("steps_before", [0, 1, 20])
def test_inverse_restores_up_to_rounding(name: str, steps_before: int) -> None:
    """Holds for elements without history as well: second moments are never negative, and zero before the first step."""
    weights = parameters()
    optimizer = OPTIMIZERS[name](weights)
    for seed in range(steps_before):
        step(optimizer, weights, seed)
    before = contents(optimizer)
    states = [[optimizer.state[w][key].clone() for key in ("exp_avg", "exp_avg_sq")] for w in weights if steps_before]
    rollback = InverseAdamRollback([optimizer])
    rollback.keep()
    step(optimizer, weights, 100)
    rollback.undo()
    for weight, reference in zip(weights, before, strict=False):
        torch.testing.assert_close(weight.detach(), reference, rtol=1e-5, atol=1e-6)
        state = optimizer.state[weight]
        assert state["step"] == steps_before and (state["exp_avg_sq"] >= 0).all()
        if not steps_before:
            assert not state["exp_avg"].any() and not state["exp_avg_sq"].any()
    for weight, (mean, square) in zip(weights, states, strict=False):
        torch.testing.assert_close(optimizer.state[weight]["exp_avg"], mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(optimizer.state[weight]["exp_avg_sq"], square, rtol=1e-3, atol=1e-7)
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert all(weight.isfinite().all() for weight in weights)


def test_inverse_detects_steps_that_lose_too_many_bits() -> None:
    weights = parameters()
    optimizer = OPTIMIZERS["adamw"](weights)
    rollback = InverseAdamRollback([optimizer])
    for seed in range(5):
        step(optimizer, weights, seed)
    assert rollback.is_safe()
    weights[1].grad[3] = 1e4
    assert not rollback.is_safe()
    assert SnapshotRollback([optimizer]).is_safe()


def test_inverse_rejects_other_optimizers() -> None:
    weights = parameters()
    with pytest.raises(UserError, match="inverse supports only torch's AdamW .*; got SGD; use .* exact"):
        InverseAdamRollback([OPTIMIZERS["sgd"](weights)])
    with pytest.raises(UserError, match="AdamW amsgrad"):
        InverseAdamRollback([torch.optim.AdamW(weights, amsgrad=True)])
