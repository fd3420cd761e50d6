"""slime's own ``MegatronTrainRayActor`` under schedules: log-probabilities, reports and weights equal those of stock.

``ZB_SLIME`` names the checkout, and ``PYTHONPATH`` has that of Megatron-LM; tests/README.md says which.
"""

from __future__ import annotations

import pytest

from tests.helpers.clients.runs import ClientRun, Outcomes, client, run_client, without_norms

VARIABLE = "ZB_SLIME"
pytestmark = client(VARIABLE, "megatron.training", "ray", "safetensors", "transformers")
TWO_CHUNKS = "--num-virtual-stages-per-pipeline-rank 2"
# On a V, other ranks add the squares of the same gradients, so that a clipped gradient may differ in its last bit.
UNCLIPPED = f"{TWO_CHUNKS} --clip-grad 0"
SHARED = f"{UNCLIPPED} --rollout-data-postprocess-path tests.helpers.clients.slime.share"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    runs = [
        ClientRun("stock"),
        ClientRun("zb-h1", "zb-h1"),
        ClientRun("stock of two chunks", None, {"arguments": TWO_CHUNKS}),
        ClientRun("interleaved-1f1b", "interleaved-1f1b", {"arguments": TWO_CHUNKS}),
        ClientRun("zb-interleaved", "zb-interleaved", {"arguments": TWO_CHUNKS}),
        ClientRun("unclipped stock", None, {"arguments": UNCLIPPED}),
        ClientRun("zb-v", "zb-v", {"arguments": SHARED}),
    ]
    return run_client("slime", VARIABLE, runs, tmp_path_factory.mktemp("slime"))


@pytest.mark.parametrize(
    ("name", "stock"),
    [
        ("zb-h1", "stock"),
        ("interleaved-1f1b", "stock of two chunks"),
        ("zb-interleaved", "stock of two chunks"),
    ],
)
def test_a_run_equals_its_stock_run(outcomes: Outcomes, name: str, stock: str) -> None:
    outcomes.check_equal(name, stock)


def test_a_run_on_a_v_equals_stock_but_for_the_norm(outcomes: Outcomes) -> None:
    outcomes.check_equal("zb-v", "unclipped stock", without_norms("train/grad_norm"))
