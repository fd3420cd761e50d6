"""Published recipes in small sizes: the change of every row that ``advise`` prints has the numbers that it promises.

All jobs continue a checkpoint of the stock job, since other stages have other initial weights, and none is clipped,
since the norms of other stages are summed in another order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.planning.change import ORDER, ROUNDED
from tests.helpers.megatron_lm import VARIABLE, Checkout, Log, pretrain_gpt
from tests.helpers.small_recipes import SMALL, Row, small_job
from tests.integration.megatron_lm.test_parity import CHECKOUTS, until

pytestmark = [
    pytest.mark.skipif(not CHECKOUTS, reason=f"{VARIABLE} names no checkout of Megatron-LM"),
    pytest.mark.timeout(1200),
]
_ROWS = [
    pytest.param(
        name,
        number,
        marks=() if number == 0 else pytest.mark.full,
        id=f"{name}-{row.flags.replace('--zero-bubble-', '')}",
    )
    for name, small in SMALL.items()
    for number, row in enumerate(small.rows)
]
_COMMON = "--clip-grad 1000 --ckpt-format torch_dist"


class Trained(NamedTuple):
    """A run.

    Attributes:
        figures: losses and norms with all their digits, by name and iteration.
        weights: digests.
    """

    figures: dict[tuple[str, int], float]
    weights: list[str]


def _run(checkout: Checkout, num_ranks: int, flags: Sequence[str], *more: str) -> Log:
    log = pretrain_gpt(checkout, num_ranks, f"{' '.join(flags)} {_COMMON}", None, more)
    assert log.exit_codes == (0,) * num_ranks, log.text[-4000:]
    return log


def _train(checkout: Checkout, num_ranks: int, flags: Sequence[str], folder: Path, *more: str) -> Trained:
    """Run a job, with what it logs in the folder."""
    writers = ["--tensorboard-dir", str(folder / "tensorboard")]
    writers += ["--wandb-project", "p", "--wandb-exp-name", "e", "--wandb-save-dir", str(folder)]
    log = _run(checkout, num_ranks, flags, *more, *writers)
    logged = map(json.loads, (folder / "logged.jsonl").read_text().splitlines())
    figures = {(name, step): value for step, of in logged for name, value in of.items() if re.search("loss|norm", name)}
    return Trained(figures, log.weights)


Stock = Callable[[Checkout, str, str], tuple[tuple[str, ...], Trained]]


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    """Return the flags that load a checkpoint of the stock job of a recipe, and the job's continuation; each runs once.

    Without the optimizer's state: on CPUs Megatron-LM cannot load that of the distributed optimizer.
    """
    found: dict[tuple[Checkout, str, bool], tuple[tuple[str, ...], Trained]] = {}

    def run(checkout: Checkout, name: str, numbers: str) -> tuple[tuple[str, ...], Trained]:
        key = checkout, name, numbers == ROUNDED
        if key not in found:
            job, folder = small_job(name, numbers), tmp_path_factory.mktemp("stock")
            _run(checkout, job.num_ranks, job.flags, *until(1, folder / "checkpoint"), "--no-save-optim")
            load = ("--load", str(folder / "checkpoint"), "--no-load-optim")
            found[key] = load, _train(checkout, job.num_ranks, job.flags, folder, *load)
        return found[key]

    return run


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
@pytest.mark.parametrize(("name", "number"), _ROWS)
def test_rows_of_recipes_have_the_numbers_that_they_promise(
    checkout: Checkout, name: str, number: int, stock: Stock, tmp_path: Path
) -> None:
    row = SMALL[name].rows[number]
    job = small_job(name, row.numbers)
    flags = [*job.with_row(row), "--zero-bubble-exact"]
    assert main(["dry-run", "--gpus-per-node", str(job.num_ranks), "--megatron-lm", "--", *flags]) == 0
    load, expected = stock(checkout, name, row.numbers)
    own = _train(checkout, job.num_ranks, flags, tmp_path, *load)
    assert len(own.figures) >= 3 * 2 and len(own.weights) > 10
    assert own.figures.keys() == expected.figures.keys()
    for key, value in expected.figures.items():
        tolerance = 1e-5 if row.numbers == ROUNDED else 1e-6 if row.numbers == ORDER and "norm" in key[0] else 0.0
        assert own.figures[key] == pytest.approx(value, rel=tolerance, abs=0.0), key
    assert row.numbers == ROUNDED or _comparable(own, row) == _comparable(expected, row)


def _comparable(trained: Trained, row: Row) -> list[str]:
    """The digests that are equal if the weights are: other stages have other shards of the distributed optimizer."""
    return [digest for digest in trained.weights if row.numbers != ORDER or "optimizer's" not in digest]
