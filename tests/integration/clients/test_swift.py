"""ms-swift's own ``megatron sft`` under schedules: logged figures and weights equal those of stock.

``ZB_MS_SWIFT`` names the checkout; tests/README.md says what must be installed.
"""

from __future__ import annotations

import pytest

from tests.helpers.clients.runs import ClientRun, Outcomes, client, run_client, without_norms

VARIABLE = "ZB_MS_SWIFT"
pytestmark = client(VARIABLE, "datasets", "mcore_bridge", "modelscope", "peft", "transformers")


TWO_CHUNKS = {"arguments": "--virtual_pipeline_model_parallel_size 2"}
# On a V, other ranks add the squares of the same gradients, so that a clipped gradient may differ in its last bit.
UNCLIPPED = {"arguments": "--virtual_pipeline_model_parallel_size 2 --clip_grad 0"}
ADAPTERS = {"arguments": "--tuner_type lora --lora_rank 4 --lora_alpha 8 --target_modules all-linear"}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    runs = [
        ClientRun("stock"),
        ClientRun("zb-h1", "zb-h1"),
        ClientRun("stock of two chunks", None, TWO_CHUNKS),
        ClientRun("zb-interleaved", "zb-interleaved", TWO_CHUNKS),
        ClientRun("unclipped stock", None, UNCLIPPED),
        ClientRun("zb-v", "zb-v", UNCLIPPED),
        ClientRun("stock of adapters", None, ADAPTERS),
        ClientRun("zb-h1 of adapters", "zb-h1", ADAPTERS),
    ]
    return run_client("swift", VARIABLE, runs, tmp_path_factory.mktemp("swift"))


@pytest.mark.parametrize(
    ("name", "stock"),
    [("zb-h1", "stock"), ("zb-interleaved", "stock of two chunks"), ("zb-h1 of adapters", "stock of adapters")],
)
def test_a_run_equals_its_stock_run(outcomes: Outcomes, name: str, stock: str) -> None:
    outcomes.check_equal(name, stock)


def test_a_run_on_a_v_equals_stock_but_for_the_norm(outcomes: Outcomes) -> None:
    outcomes.check_equal("zb-v", "unclipped stock", without_norms("grad_norm"))
