"""Sharded units in jobs of Megatron-LM: chunks stay shards between iterations, and what reads weights finds them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.zero_bubble import build
from megatron.zero_bubble.core.plan import Additions, plan_of
from megatron.zero_bubble.core.plan.shard import Sharding, most_whole
from tests.helpers.megatron_lm import Checkout, Log, pretrain_gpt, stock
from tests.helpers.ranks import RankPool
from tests.integration.megatron_lm.test_parity import CASES, CHECKOUTS, NUM_MICROBATCHES, Row, job_of, same

pytestmark = pytest.mark.timeout(1200)
MORE = "--num-virtual-stages-per-pipeline-rank 2"
UNITS = ("--zero-bubble-shard-weights", "--zero-bubble-unit-microbatches", "64")
FOUR = "--num-layers 8 --num-virtual-stages-per-pipeline-rank 4"
UNTIED = "--untie-embeddings-and-output-weights"


def check_bytes(own: Log, num_chunks: int, pipeline: int = 2) -> None:
    """Whole at a time is what the plan says, at most two chunks with weights and two with gradients; then nothing."""
    lines = own.of("sharded units: {")
    assert len(lines) == len(own.exit_codes) == 2 * pipeline
    size = {"num_ranks": pipeline, "num_microbatches": NUM_MICROBATCHES[pipeline], "num_chunks": num_chunks}
    plan = plan_of(build("zero-pp", **size, unit_microbatches=64), Additions(sharding=Sharding(64)))
    for line in lines:
        found = json.loads(line.partition(": ")[2])
        rank = found["rank"] // 2
        weights, gradients = [0.0] * pipeline * num_chunks, [0.0] * pipeline * num_chunks
        weights[rank::pipeline], gradients[rank::pipeline] = zip(*found["sizes"], strict=True)
        assert found["kept"] == 0
        assert found["whole"] == most_whole(plan.ops[rank], weights, gradients)
        assert 0 < found["whole"] <= sum(sorted(weights)[-2:]) + sum(sorted(gradients)[-2:])


@pytest.mark.full
@pytest.mark.parametrize(("checkout", "pipeline"), CASES)
@pytest.mark.parametrize(
    "options",
    [
        "--log-params-norm --log-num-zeros-in-grad --eval-interval 4",
        f"--bf16 --check-weight-hash-across-dp-replicas-interval 2 {UNTIED}",
        f"--fp16 --initial-loss-scale 16777216 --hysteresis 1 {UNTIED}",
    ],
)
def test_logs_equal_stock(checkout: Checkout, pipeline: int, options: str) -> None:
    """One unit of all microbatches, with an evaluation at the end; all that reads weights between iterations."""
    row = Row(f"--use-distributed-optimizer {options}", ranks_per_stage=2, samples=2)
    job = job_of(checkout, pipeline, row, MORE)
    own = pretrain_gpt(*job, "zero-pp", UNITS)
    same(own, stock(*job))
    check_bytes(own, 2, pipeline)
    assert ("--fp16" in options) == any("number of skipped iterations:   1" in line for line in own.figures)


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
def test_only_some_chunks_are_whole(checkout: Checkout) -> None:
    """Two chunks of four per rank, optimizer steps and evaluations included."""
    row = Row(f"--use-distributed-optimizer --bf16 --eval-interval 4 {UNTIED}", ranks_per_stage=2, samples=2)
    job = job_of(checkout, 2, row, FOUR)
    own = pretrain_gpt(*job, "zero-pp", UNITS)
    same(own, stock(*job))
    check_bytes(own, 4)


@pytest.mark.full
@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
@pytest.mark.parametrize(
    ("form", "options"),
    [("torch_dist", ""), ("torch_dist", "--bf16 --swiglu"), ("torch_dist", "--bf16 --async-save"), ("torch", "--bf16")],
)
def test_checkpoints_continue_both_ways(checkout: Checkout, form: str, options: str, tmp_path: Path) -> None:
    """Jobs with sharded units continue stock's checkpoint as stock does, and stock continues theirs.

    Without the state of the optimizer: Megatron-LM cannot load that of torch's Adam, the only one on CPUs.
    """
    flags = f"{MORE} --ckpt-format {form} --no-save-optim --no-load-optim"
    job = job_of(checkout, 2, Row(f"--use-distributed-optimizer {options}", ranks_per_stage=2, samples=2), flags)
    until, folders = ("--save-interval", "4", "--exit-interval", "4"), [tmp_path / "stock", tmp_path / "own"]
    for folder, schedule in zip(folders, (None, "zero-pp"), strict=True):
        saved = pretrain_gpt(*job, schedule, (*(UNITS if schedule else ()), "--save", str(folder), *until))
        assert "exiting program at iteration 4" in saved.text, saved.text[-4000:]
        if schedule:
            whole = f"weights stay whole between iterations: --ckpt-format {form}" in saved.text
            assert whole == (form != "torch_dist")
            if not whole:
                check_bytes(saved, 2)
    expected = stock(*job, ("--load", str(folders[0])))
    same(pretrain_gpt(*job, "zero-pp", (*UNITS, "--load", str(folders[0]))), expected)
    again = stock(*job, ("--load", str(folders[1])))
    assert (again.figures, again.weights) == (expected.figures, expected.weights)


@pytest.mark.full
@pytest.mark.parametrize(("checkout", "pipeline"), CASES[:1])
def test_overlap_is_refused(checkout: Checkout, pipeline: int) -> None:
    row = Row("--use-distributed-optimizer --overlap-grad-reduce", ranks_per_stage=2, samples=2)
    own = pretrain_gpt(*job_of(checkout, pipeline, row, MORE), "zero-pp", ("--zero-bubble-shard-weights",))
    assert 0 not in own.exit_codes
    assert "sharded units need overlap_grad_reduce=False" in own.text


class Units:
    """Units that tell whether weights are whole."""

    are_whole = are_shards = False

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        self.are_whole = True
        yield
        self.are_whole = False


def read(rank: int) -> tuple[bool, bool]:
    """Whether weights are whole in a function of a script, and in the evaluation that calls it."""
    from megatron.zero_bubble.integration.megatron_lm.shards import JobShards
    from megatron.zero_bubble.integration.patching.seams import installed_seams

    units: Any = Units()
    seams = installed_seams().readers
    make = dict(JobShards(units, SimpleNamespace()).replacements(seams))[seams.evaluates]

    def evaluate(prefix: str, model: object, non_loss_data_func: Any = None) -> tuple[bool, bool]:
        assert (prefix, model) == ("test", None)
        return (False if non_loss_data_func is None else non_loss_data_func(model)), units.are_whole

    assert make(evaluate)("test", None) == (False, False)
    return make(evaluate)("test", None, non_loss_data_func=lambda _: units.are_whole)


def test_functions_of_a_script_find_whole_weights(ranks: RankPool) -> None:
    assert ranks.run(1, read) == [(True, False)]


def reasons(rank: int) -> list[list[str]]:
    from megatron.zero_bubble.integration.megatron_lm.shards import reads_weights

    job = {"ckpt_format": "torch_dist", "save": "somewhere"}
    others = ({}, {"ckpt_format": "torch"}, {"ckpt_format": "torch", "save": None}, {"save_params_interval": 2})
    return [reads_weights(SimpleNamespace(**{**job, **more})) for more in (*others, {"qk_clip": True})]


def test_other_readers_keep_weights_whole(ranks: RankPool) -> None:
    expected = [[], ["--ckpt-format torch"], [], ["--save-params-interval"], ["--qk-clip"]]
    assert ranks.run(1, reasons) == [expected]
