"""Tests of what split TransformerEngine linears refuse, and of what they leave alone, on a fake engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Kind, Pass
from megatron.zero_bubble.engine.wgrad.store import WgradStore
from tests.engine.wgrad.test_transformer_engine import (
    IN,
    OUT,
    SPLIT_ORDER,
    Layers,
    Run,
    assert_same_bits,
    gradients,
    split,
    stock,
)
from tests.helpers import engine


def outside_a_schedule(store: WgradStore) -> None:
    Run(Layers, False, store).ddp.module(torch.ones(2, IN, requires_grad=True), 0).sum().backward()


def without_data_parallelism(store: WgradStore) -> None:
    with store.defer(Pass(0, Kind.B, 0)):
        engine.Linear(IN, OUT)(torch.ones(2, IN, requires_grad=True)).sum().backward()


def a_later_microbatch_first(store: WgradStore) -> None:
    Run(lambda: Layers(fuse_wgrad_accumulation=True), False, store).passes("F0 F1 B1 B0")


def a_weight_used_elsewhere_later(store: WgradStore) -> None:
    run = Run(Layers, False, store)
    run.passes("F0 B0")
    with store.defer(Pass(0, Kind.B, 1)):
        run.ddp.module.second.weight.sum().backward()  # type: ignore[union-attr, operator]


def a_weight_used_here_and_elsewhere(store: WgradStore) -> None:
    module: Any = Run(Layers, False, store).ddp.module
    with store.defer(Pass(0, Kind.B, 0)):
        (module(torch.ones(2, IN, requires_grad=True), 0).sum() + module.second.weight.sum()).backward()


def a_bias_used_alone(store: WgradStore) -> None:
    run = Run(Layers, False, store)
    with store.defer(Pass(0, Kind.B, 0)):
        run.ddp.module.second.bias.sum().backward()  # type: ignore[union-attr, operator]


@pytest.mark.parametrize(
    "train, sentence",
    [
        (outside_a_schedule, "outside a zero-bubble schedule, so its deferred weight gradient"),
        (without_data_parallelism, "Linear has none; wrap the model in it"),
        (a_later_microbatch_first, "runs microbatch 1 before it; sort the backwards"),
        (a_weight_used_elsewhere_later, "a weight of Linear got another gradient than TransformerEngine's"),
        (a_weight_used_here_and_elsewhere, "a weight of Linear got another gradient than TransformerEngine's"),
        (a_bias_used_alone, "a bias of Linear got a gradient but its weight got none"),
    ],
)
def test_unsupported_use_is_rejected(train: Callable[[WgradStore], None], sentence: str) -> None:
    with split() as store, pytest.raises(UserError, match=sentence):
        train(store)


def test_overlaps_that_deferred_gradients_cannot_have_are_switched_off() -> None:
    """What a linear would keep in a shared buffer until W, and the reduction that runs at B; each is logged once."""
    said: list[str] = []
    with split(said.append):
        bulk = [engine.Linear(IN, OUT, parallel_mode=mode, ub_bulk_wgrad=True) for mode in ("row", "column")]
        inputs = [engine.Linear(IN, OUT, parallel_mode=mode, ub_bulk_dgrad=True) for mode in ("row", "column")]
        outputs = [engine.Linear(IN, OUT, parallel_mode=mode, ub_overlap_ag=True) for mode in ("row", "column")]
        assert all(linear.wgrad_store.delay_wgrad_compute() for linear in (*bulk, *inputs, *outputs))
    assert not any(linear.ub_bulk_dgrad or linear.ub_overlap_ag_dgrad for linear in (*bulk, *inputs, *outputs))
    why = "is switched off, because W must not find its operands in the buffers of --tp-comm-overlap"
    assert said == [f"tp_comm_{name} {why}" for name in ("bulk_wgrad", "bulk_dgrad", "overlap_ag")]


def test_model_built_before_apply_is_rejected() -> None:
    with engine.installed():
        before = Layers()
        with split() as store:
            store.watch([Layers()])
            with pytest.raises(UserError, match="called before the model is built, because .* LayerNormLinear decides"):
                store.watch([before])


def test_undelayed_modules_and_split_parameters_are_not_deferred() -> None:
    with split() as store:
        store.watch([engine.Linear(IN, OUT, delay_wgrad_compute=False)])
        own = engine.Linear(IN, OUT, delay_wgrad_compute=False), engine.Linear(IN, OUT, parameters_split=("q", "k"))
        assert not any(linear.wgrad_store.delay_wgrad_compute() for linear in own)


def test_gradients_that_the_caller_delays_wait_for_w() -> None:
    """megatron-core builds its linears so with its own option, which a loop of one's own has not switched off yet."""
    asked = partial(Layers, delay_wgrad_compute=True)
    expected = gradients(stock(Layers, SPLIT_ORDER))
    with split() as store:
        assert_same_bits(Run(asked, False, store).passes(SPLIT_ORDER), expected)


def test_data_parallel_without_delay_support_is_rejected() -> None:
    with split(), pytest.raises(UserError, match=r"0\.14 or newer"):
        engine.DataParallel(None, SimpleNamespace(), Layers())


def test_model_cannot_train_after_revert() -> None:
    with split() as store:
        own = Run(Layers, False, store)
    for source in store._sources:
        source.close()  # type: ignore[attr-defined]
    own.store = None
    with pytest.raises(UserError, match=r"build the model again after revert\(\)"):
        own.passes("F0 B0")


def test_users_ddp_config_is_not_changed() -> None:
    ddp_config = SimpleNamespace(delay_wgrad_compute=False)
    with split():
        engine.DataParallel(None, ddp_config, Layers())
    assert ddp_config.delay_wgrad_compute is False


def test_w_out_of_order_is_rejected() -> None:
    with split() as store, pytest.raises(AssertionError, match="must run in the order of B"):
        Run(Layers, False, store).passes("F0 F1 B0 B1 W1")


class _Turbo(engine.Linear):
    """Inherits TransformerEngine's linear, and multiplies by itself."""

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        y = x @ self.weight.t()
        return (y, self.bias if self.use_bias else None) if self.return_bias else y


class _Derived(Layers):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.second = _Turbo(IN, OUT, return_bias=True, **options)


@pytest.mark.parametrize("order", [SPLIT_ORDER, "F0 F1 BW0 F2 B1 F3 W1 BW2 B3 W3"])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_that_multiplies_by_itself_runs_its_backward_in_b(bias: bool, order: str) -> None:
    def make() -> torch.nn.Module:
        return _Derived(bias=bias)

    expected, lines = stock(make, order), []
    with split(lines.append) as store:
        own = Run(make, False, store)
        assert_same_bits(own.passes(order), gradients(expected))
        assert sorted(own.ddp.ready) == sorted(expected.ddp.ready)
        assert not len(store)
        own.passes(order)
    (line,) = lines  # it is known from then on
    assert line.startswith(
        "_Turbo is a linear of TransformerEngine but its weights are multiplied by something else, such"
    )
