"""``McaTrainer``, with which LLaMA-Factory trains, under schedules: logged figures and weights equal those of stock.

``ZB_MCORE_ADAPTER`` names the folder ``mcore_adapter/src`` of ROLL; tests/README.md says what must be installed.
"""

from __future__ import annotations

import pytest

from tests.helpers.clients.runs import ClientRun, Outcomes, client, run_client

VARIABLE = "ZB_MCORE_ADAPTER"
pytestmark = client(VARIABLE, "accelerate", "peft", "transformers")
TWO_CHUNKS = {"virtual_pipeline_model_parallel_size": 2}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    runs = [
        ClientRun("stock"),
        ClientRun("zb-h1", "zb-h1"),
        ClientRun("stock of two chunks", None, TWO_CHUNKS),
        ClientRun("zb-interleaved", "zb-interleaved", TWO_CHUNKS),
    ]
    return run_client("mca", VARIABLE, runs, tmp_path_factory.mktemp("mca"))


@pytest.mark.parametrize(("name", "stock"), [("zb-h1", "stock"), ("zb-interleaved", "stock of two chunks")])
def test_a_run_equals_its_stock_run(outcomes: Outcomes, name: str, stock: str) -> None:
    outcomes.check_equal(name, stock)
