"""ms-swift's own ``megatron sft`` under schedules: logged figures and weights equal those of stock.

``ZB_MS_SWIFT`` names the checkout; tests/README.md says what must be installed.
"""

from __future__ import annotations

import pytest

from tests.helpers.clients.runs import ClientRun, Outcomes, client, run_client

VARIABLE = "ZB_MS_SWIFT"
pytestmark = client(VARIABLE, "datasets", "mcore_bridge", "modelscope", "peft", "transformers")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    runs = [
        ClientRun("stock"),
        ClientRun("zb-h1", "zb-h1"),
    ]
    return run_client("swift", VARIABLE, runs, tmp_path_factory.mktemp("swift"))


@pytest.mark.parametrize(("name", "stock"), [("zb-h1", "stock")])
def test_a_run_equals_its_stock_run(outcomes: Outcomes, name: str, stock: str) -> None:
    outcomes.check_equal(name, stock)
