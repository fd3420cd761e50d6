"""verl's own ``TrainingWorker`` and Megatron engine under schedules: reports and weights equal those of stock.

``ZB_VERL`` names the checkout; tests/README.md says what must be installed.
"""

from __future__ import annotations

import pytest

from tests.helpers.clients.runs import ClientRun, Outcomes, client, run_client, without_norms

VARIABLE = "ZB_VERL"
pytestmark = client(VARIABLE, "mbridge", "omegaconf", "ray", "tensordict", "transformers")
TWO_CHUNKS = {"virtual_pipeline_model_parallel_size": 2}
RECOMPUTED = {
    "transformer": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
}
# On a V, other ranks add the squares of the same gradients, so that a clipped gradient may differ in its last bit.
UNCLIPPED = {"clip": 0.0}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    runs = [
        ClientRun("stock"),
        ClientRun("zb-h1", "zb-h1"),
        ClientRun("stock of two chunks", None, {"engine": TWO_CHUNKS}),
        ClientRun("interleaved-1f1b", "interleaved-1f1b", {"engine": TWO_CHUNKS}),
        ClientRun("zb-interleaved", "zb-interleaved", {"engine": TWO_CHUNKS}),
        ClientRun("unclipped stock", None, UNCLIPPED | {"engine": TWO_CHUNKS}),
        ClientRun("zb-v", "zb-v", UNCLIPPED | {"engine": TWO_CHUNKS}),
        ClientRun("recomputed stock", None, RECOMPUTED),
        ClientRun("recomputed zb-h1", "zb-h1", RECOMPUTED),
    ]
    return run_client("verl", VARIABLE, runs, tmp_path_factory.mktemp("verl"))


@pytest.mark.parametrize(
    ("name", "stock"),
    [
        ("zb-h1", "stock"),
        ("interleaved-1f1b", "stock of two chunks"),
        ("zb-interleaved", "stock of two chunks"),
        ("recomputed zb-h1", "recomputed stock"),
    ],
)
def test_a_run_equals_its_stock_run(outcomes: Outcomes, name: str, stock: str) -> None:
    outcomes.check_equal(name, stock)


def test_a_run_on_a_v_equals_stock_but_for_the_norm(outcomes: Outcomes) -> None:
    outcomes.check_equal("zb-v", "unclipped stock", without_norms("grad_norm"))
