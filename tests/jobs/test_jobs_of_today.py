"""Each of the 24 jobs of today equals its stock run, bit for bit, or is refused with the sentence of its row.

Loops run on the installed megatron-core, other jobs on the checkouts that ``ZB_MEGATRON_LM`` and ``ZB_BRIDGE`` name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.bert_jobs import pretrain_bert
from tests.helpers.bridge.runs import NUM_RANKS, BridgeRun, bridge, core, run_bridge
from tests.helpers.hybrid_jobs import pretrain_hybrid
from tests.helpers.megatron_lm import VARIABLE, Checkout, Log, checkouts, pretrain_gpt
from tests.helpers.ranks import RankPool
from tests.helpers.rows import some
from tests.integration.megatron_lm.test_models import pretrain_vlm
from tests.integration.megatron_lm.test_parity import same
from tests.jobs.table import BRIDGE, EQUAL, LOOPS, REFUSED, SCRIPTS, ScriptJob
from tests.loops.checkouts import check_on
from tests.loops.compare import SCHEDULES, differences, outcomes

CHECKOUTS = checkouts()
PIPELINE = "--pipeline-model-parallel-size 2 --train-iters 6 --seq-length 32 --max-position-embeddings 32"
# Other placements draw other initial weights and sum the norm in another order: they continue a checkpoint of stock.
MOVING = "--clip-grad 1000 --ckpt-format torch_dist"
LENGTHS = "zero-bubble schedules need variable_seq_lengths=False, because receives are posted before shapes are known"


def test_there_are_24_jobs() -> None:
    assert len({*SCRIPTS, *BRIDGE, *LOOPS}) == len(SCRIPTS) + len(BRIDGE) + len(LOOPS) == 24


def of_scripts(refused: bool = False) -> list[Any]:
    """Checkout, job, and a schedule or the flags that are refused, for every row that the checkout can run."""
    return [
        pytest.param(checkout, job, what, id=f"{checkout} {name} {what}")
        for checkout in CHECKOUTS
        for name, job in SCRIPTS.items()
        for what in (job.refused if refused else job.runs)
        if _can_run(checkout, job, what)
    ]


def _can_run(checkout: Checkout, job: ScriptJob, what: str) -> bool:
    minor = int(checkout.minor.partition(".")[2])
    if job.script == "bert":
        return minor == 16
    divides = job.script != "hybrid" or (checkout.path / "pretrain_hybrid.py").is_file()
    return minor >= job.since and (divides or what in (*job.refused, "zb-h1"))


def run_script(
    checkout: Checkout, job: ScriptJob, schedule: str | None, layers: str, more: tuple[str, ...] = ()
) -> Log:
    """Run the job to its end; ``layers`` are flags or the pattern of a hybrid model."""
    if job.script == "vlm":
        return pretrain_vlm(checkout, schedule, f"{job.flags} {layers} {' '.join(more)}")
    if job.script == "bert":
        return pretrain_bert(checkout, job.num_ranks, f"{PIPELINE} {job.flags}", schedule)
    if job.script == "hybrid":
        pattern = layers if (checkout.path / "pretrain_hybrid.py").is_file() else layers.replace("|", "")
        return pretrain_hybrid(checkout, job.num_ranks, pattern, f"{PIPELINE} {job.flags}", schedule, more)
    length = PIPELINE.replace("--train-iters 6", "") if "--train-samples" in job.flags else PIPELINE
    return pretrain_gpt(checkout, job.num_ranks, f"{length} {job.flags} {layers}", schedule, more)


@pytest.mark.skipif(not CHECKOUTS, reason=f"{VARIABLE} names no checkout of Megatron-LM")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("checkout", "job", "schedule"), of_scripts())
def test_a_script_equals_stock(checkout: Checkout, job: ScriptJob, schedule: str, tmp_path: Path) -> None:
    of_stock, ours = job.runs[schedule]
    more: tuple[str, ...] = ()
    if schedule == "zb-v":
        folder = ("--save", str(tmp_path), "--save-interval", "2", "--exit-interval", "2")
        saved = run_script(checkout, job, None, of_stock, (*MOVING.split(), *folder))
        assert "exiting program at iteration 2" in saved.text, saved.text[-4000:]
        more = (*MOVING.split(), "--load", str(tmp_path))
    expected = run_script(checkout, job, None, of_stock, more)
    assert set(expected.exit_codes) == {0}, expected.text[-4000:]
    same(run_script(checkout, job, schedule, ours, more), expected)


@pytest.mark.skipif(not CHECKOUTS, reason=f"{VARIABLE} names no checkout of Megatron-LM")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("checkout", "job", "flags"), of_scripts(refused=True))
def test_a_script_is_refused(checkout: Checkout, job: ScriptJob, flags: str) -> None:
    schedule, (_, layers) = next(iter(job.runs.items()))
    log = run_script(checkout, job, schedule, layers, tuple(flags.split()))
    assert set(log.exit_codes) == {1}, log.text[-4000:]
    sentences = [line for line in log.of("zero-bubble: ") if job.refused[flags] in line]
    assert len(sentences) == job.num_ranks, log.text[-4000:]
    assert "Traceback" not in log.text and not log.figures


def bridge_runs() -> list[BridgeRun]:
    """For every run of Megatron-Bridge that has to equal stock, that of stock and ours; then those that are refused."""
    found = []
    for name, job in BRIDGE.items():
        rows = {schedule: {**job.settings, **more} for schedule, more in job.runs.items()}
        if job.lengths:
            rows["zb-h1 of variable lengths"] = {**job.settings, "model.variable_seq_lengths": True}
        rows |= {f"zb-h1 with {field}": {**job.settings, field: value} for field, (value, _) in job.refused.items()}
        for row, settings in rows.items():
            under = {"ZERO_BUBBLE_SCHEDULE": row.split()[0], "ZERO_BUBBLE_EXACT": "1"}
            if row in job.runs or (job.lengths == EQUAL and "lengths" in row):
                found.append(BridgeRun(f"{name} {row} stock", {}, settings, provider=job.provider))
            found.append(BridgeRun(f"{name} {row} ours", under, settings, provider=job.provider))
    return found


@pytest.fixture(scope="module")
def of_bridge(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Log]:
    if bridge() is None or core() is None:
        pytest.skip("ZB_BRIDGE names no checkout of Megatron-Bridge, or ZB_MEGATRON_LM none of 0.20 or newer")
    logs = run_bridge(bridge_runs(), tmp_path_factory.mktemp("bridge"))
    last, log = list(logs.items())[-1]
    assert log.exit_codes == [0] * NUM_RANKS, f"{last}: {log.text[-6000:]}"
    return logs


@pytest.mark.timeout(900)
@pytest.mark.parametrize("row", [f"{name} {schedule}" for name in BRIDGE for schedule in BRIDGE[name].runs])
def test_a_run_of_bridge_equals_stock(of_bridge: dict[str, Log], row: str) -> None:
    check_bridge(of_bridge, row, EQUAL)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name, job in BRIDGE.items() if job.lengths])
def test_a_run_of_bridge_with_variable_lengths(of_bridge: dict[str, Log], name: str) -> None:
    check_bridge(of_bridge, f"{name} zb-h1 of variable lengths", BRIDGE[name].lengths, LENGTHS)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "field"), [(name, field) for name, job in BRIDGE.items() for field in job.refused])
def test_a_run_of_bridge_is_refused(of_bridge: dict[str, Log], name: str, field: str) -> None:
    check_bridge(of_bridge, f"{name} zb-h1 with {field}", REFUSED, BRIDGE[name].refused[field][1])


def check_bridge(logs: dict[str, Log], row: str, expected: str | None, sentence: str = "") -> None:
    """Compare a run with that of stock, or look for the sentence of both ranks."""
    ours = logs[f"{row} ours"]
    if expected == EQUAL:
        stock = logs[f"{row} stock"]
        assert len(ours.figures) >= 5 and len(ours.weights) > 10
        assert (ours.figures, ours.weights) == (stock.figures, stock.weights)
        assert len(ours.of("zero-bubble: schedule ")) == 1
        return
    assert ours.text.count(f"zero-bubble: {sentence}") == NUM_RANKS, ours.text[-4000:]
    assert not ours.figures


OF_LOOPS = [(name, schedule) for name in LOOPS for schedule in SCHEDULES]


@pytest.mark.parametrize(("name", "schedule"), some(OF_LOOPS, ("slime deepseek-r1", "zb-h1"), ("nemo-rl grpo", "zb-v")))
def test_a_loop_with_fixed_lengths_equals_stock(ranks: RankPool, name: str, schedule: str) -> None:
    job = LOOPS[name]
    assert differences(ranks.run(2, outcomes, job.loop, [schedule], job.options, timeout=300), [schedule]) == []


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
def test_loops_with_fixed_lengths_equal_stock_on_other_versions(checkout: Checkout, tmp_path: Path) -> None:
    check_on(checkout, {name: (job.loop, job.options) for name, job in LOOPS.items()}, tmp_path)


PACKED = {name: job.packed for name, job in LOOPS.items() if job.packed}


@pytest.mark.parametrize("name", some(PACKED, "slime glm-4.7"))
def test_a_loop_with_variable_lengths_equals_stock(ranks: RankPool, name: str) -> None:
    results = ranks.run(2, outcomes, PACKED[name], ["zb-h1"], LOOPS[name].options, timeout=300)
    assert differences(results, ["zb-h1"]) == []
