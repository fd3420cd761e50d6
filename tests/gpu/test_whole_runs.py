"""Whole runs over NCCL, compared with stock megatron-core. Every rank needs a GPU, unless NCCL lets ranks share one.

``scripts/gpu_day.sh`` runs these tests. It chooses by variables:

- ``ZB_TEST_DEVICE=cpu`` runs them on CPU ranks, to see that the tests themselves work;
- ``ZB_TEST_EAGER=1`` binds NCCL's default group to the GPU, so that torch creates communicators eagerly.
"""

from __future__ import annotations

import json
import math
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megatron.zero_bubble.engine.platforms.cuda import nccl_shares_gpus
from tests.examples.pretrain.test_faults import BACKWARD, LIMIT_S
from tests.helpers import expert_models
from tests.helpers.faults import Fault, train_with_faults
from tests.helpers.launch import Death, run_training
from tests.helpers.parity import BASE_FLAGS, Layout, Outcome, assert_same_bits, assert_same_model, train
from tests.helpers.rank_worker import Group
from tests.helpers.ranks import RankPool, install_cpu_platform
from tests.helpers.slices import LONG
from tests.helpers.training import losses
from tests.helpers.training import train as train_job
from tests.integration.adapter.test_parity import BUCKETS, FP16, UNTIED
from tests.loops import varied

DEVICE = os.environ.get("ZB_TEST_DEVICE", "cuda")
ON_CPU = DEVICE == "cpu"
GROUP = Group() if ON_CPU else Group("nccl", os.environ.get("ZB_TEST_EAGER") == "1")
RUN_S = 150 if ON_CPU else 45
"""Limit of the slowest rank: a hang shows the stacks of all ranks, so that it costs little."""
NUM_RANKS = 4 if ON_CPU or nccl_shares_gpus() else max(1, min(4, torch.cuda.device_count()))
ON = f"--zero-bubble-device {DEVICE}"

PRECISIONS = {"fp32": "", "bf16": "--bf16", "fp16": FP16}
PLACEMENTS = {"linear": ("1f1b", "zb-h1", "zb-h2"), "vee": ("zb-v", "v-half", "v-min", "dualpipe-v")}
TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 5e-3}
"""Of losses and norms with fused weight gradients, from docs/exactness.md."""

pytestmark = [pytest.mark.timeout(200), *([] if ON_CPU else [pytest.mark.gpu])]

Record = Callable[[str, object], None]


def nothing() -> None:
    """The initializer of ranks on GPUs."""


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    if NUM_RANKS < 2:
        pytest.skip("NCCL needs one GPU per rank")
    made = RankPool(install_cpu_platform if ON_CPU else nothing, GROUP, forked=ON_CPU)
    yield made
    made.close()


def figures(outcome: Outcome) -> dict[str, list[float]]:
    """The losses and norms of a rank, for the record."""
    losses = [float.fromhex(text) for text in (words.split()[-1] for words in outcome.losses) if text != "None"]
    norms = [float.fromhex(norm) for norm in outcome.grad_norms if norm != "skipped"]
    return {"losses": losses, "grad_norms": norms}


def same(results: list[list[Outcome]], index: int) -> bool:
    """Whether the losses and weights of a schedule equal those of the first, on whatever rank the weights are."""
    weights: list[dict[str, str]] = [{}, {}]
    for outcomes in results:
        for number, place in enumerate((0, index)):
            weights[number].update(outcomes[place].weights)
    return weights[0] == weights[1] and all(outcomes[index].losses == outcomes[0].losses for outcomes in results)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_schedules_have_the_same_bits(pool: RankPool, record_property: Record, precision: str, placement: str) -> None:
    """All schedules and zb-auto, which begins as 1F1B or ZB-V; five steps with evaluations."""
    layout = Layout(NUM_RANKS, num_layers=2 * NUM_RANKS)
    options = f"{PRECISIONS[precision]} --clip-grad {0 if placement == 'vee' else 1} {ON}"
    schedules = [None, *PLACEMENTS[placement]]
    results = pool.run(NUM_RANKS, train, layout.flags(5, options), schedules, timeout=RUN_S)
    record_property("reference", figures(results[-1][0]))
    record_property("equal", {name: same(results, i) for i, name in enumerate(schedules) if i})
    if placement == "linear":
        assert_same_bits(results, schedules)
    else:
        assert_same_model(results, schedules, layout)


@pytest.mark.parametrize("vee", [False, True], ids=["linear", "vee"])
def test_zb_auto_has_the_same_bits(pool: RankPool, record_property: Record, vee: bool) -> None:
    """Fourteen steps: it measures, plans, and switches schedules."""
    layout = Layout(2, num_layers=4)
    options = f"--bf16 --train-iters 14 {'--zero-bubble-placement vee' if vee else ''} {ON}"
    schedules = [None, "zb-auto"]
    results = pool.run(2, train, layout.flags(5, options), schedules, timeout=RUN_S)
    record_property("equal", {"zb-auto": same(results, 1)})
    if vee:
        assert_same_model(results, schedules, layout, 14)
    else:
        assert_same_bits(results, schedules, 14)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_fused_gradients_are_near(pool: RankPool, record_property: Record, precision: str) -> None:
    """The default mode rounds weight gradients less often than stock, and equally under all schedules."""
    options = f"{PRECISIONS[precision]} --zero-bubble-fuse-wgrad {ON}"
    schedules = ["1f1b", "zb-h1", "zb-h2"]
    results = pool.run(NUM_RANKS, train, Layout(NUM_RANKS).flags(5, options), schedules, timeout=RUN_S)
    assert_same_bits([outcomes[1:] for outcomes in results], schedules[1:])
    worst = 0.0
    for outcomes in results:
        expected, found = figures(outcomes[0]), figures(outcomes[1])
        for name, values in expected.items():
            worst = max([worst, *(abs(a / b - 1) for a, b in zip(found[name], values, strict=True))])
    record_property("largest_relative_difference", worst)
    assert worst <= TOLERANCES[precision]


@pytest.mark.parametrize("distributed", [False, True], ids=["ddp", "distributed optimizer"])
def test_data_parallel_ranks_agree(pool: RankPool, record_property: Record, distributed: bool) -> None:
    if NUM_RANKS < 4:
        pytest.skip("needs four ranks")
    more = "--use-distributed-optimizer --overlap-param-gather" if distributed else ""
    options = f"--bf16 --overlap-grad-reduce {BUCKETS} {more} {ON}"
    schedules = [None, "zb-h1", "zb-h2"]
    results = pool.run(4, train, Layout(2, data=2).flags(3, options), schedules, timeout=RUN_S)
    record_property("equal", {name: same(results, i) for i, name in enumerate(schedules) if i})
    assert_same_bits(results, schedules)


LARGE = "" if ON_CPU else "--hidden-size 128 --seq-length 128 --max-position-embeddings 128"
"""Sizes at which most tensors of a microbatch are large enough to be moved (``runtime.offload.LEAST_BYTES``)."""
FEATURES = {
    "offload all": (Layout(NUM_RANKS), LARGE, ["zb-h2", "zb-h2 --zero-bubble-offload all"]),
    "offload 50% on a V": (
        Layout(NUM_RANKS, num_layers=2 * NUM_RANKS),
        LARGE,
        ["zb-v", "zb-v --zero-bubble-offload 50%"],
    ),
    "slices": (Layout(NUM_RANKS), LONG, ["zb-h1", "seq-zb-h1 --zero-bubble-num-slices 4"]),
    "vocabulary": (Layout(NUM_RANKS), UNTIED, ["zb-h1", "zb-h1 --zero-bubble-vocabulary-parallel 2"]),
    "shards": (
        Layout(2, data=2, num_layers=8),
        "--use-distributed-optimizer",
        ["zb-v", "zb-v --zero-bubble-shard-weights"],
    ),
}


@pytest.mark.parametrize("name", FEATURES)
def test_features_agree_with_runs_without(pool: RankPool, record_property: Record, name: str) -> None:
    """What only moves activations changes no bit; the other features add in another order."""
    layout, options, schedules = FEATURES[name]
    if name == "shards" and NUM_RANKS < 4:
        pytest.skip("needs four ranks")
    results = pool.run(layout.num_ranks, train, layout.flags(5, f"{options} {ON}"), schedules, timeout=RUN_S)
    worst = 0.0
    for outcomes in results:
        expected, found = map(figures, outcomes)
        for kind, values in expected.items():
            worst = max([worst, *(abs(a / b - 1) for a, b in zip(found[kind], values, strict=True))])
    record_property("largest_relative_difference", worst)
    if name.startswith("offload"):
        assert_same_bits(results, schedules)
    assert worst <= TOLERANCES["fp32"]


def test_vocabulary_with_one_queue_changes_nothing(record_property: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """What shares a hardware queue waits for each other, and must neither hang nor change a result."""
    if NUM_RANKS < 2:
        pytest.skip("NCCL needs one GPU per rank")
    layout, options, (_, divided) = FEATURES["vocabulary"]
    outcomes: dict[str, list[list[Outcome]]] = {}
    for queues in ("1", "32"):
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
        pool = RankPool(install_cpu_platform if ON_CPU else nothing, GROUP, forked=ON_CPU)
        try:
            outcomes[queues] = pool.run(NUM_RANKS, train, layout.flags(5, f"{options} {ON}"), [divided], timeout=RUN_S)
        finally:
            pool.close()
    one, many = outcomes.values()
    record_property("same_bits", one == many)
    assert one == many


@pytest.mark.parametrize("kind", varied.KINDS)
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_lengths_have_the_bits_of_stock(pool: RankPool, record_property: Record, schedule: str, kind: str) -> None:
    """Microbatches of different lengths: messages with headers, and shapes that all ranks or the first one give."""
    runs = varied.runs_of(schedule, kind)
    expected, *ours = zip(*pool.run(2, varied.outcomes, runs, timeout=RUN_S), strict=True)
    differences = {run[2].tells: varied.differences(expected, got) for run, got in zip(runs[1:], ours, strict=True)}
    record_property("equal", {tells: not lines for tells, lines in differences.items()})
    assert not any(differences.values()), differences


@pytest.mark.parametrize("num_layers", [4, 8])
def test_pairs_have_the_bits_of_stock(pool: RankPool, record_property: Record, tmp_path: Path, num_layers: int) -> None:
    """Experts, with pairs of a forward and a backward: two pipeline ranks, experts over two ranks."""
    if NUM_RANKS < 4:
        pytest.skip("needs four ranks")
    names = [expert_models.PLAIN, expert_models.COMBINED, *expert_models.plan_files(tmp_path, 2, 6)]
    names.append(expert_models.PLAIN_V)
    options = {"num_layers": num_layers, "moe_shared_expert_intermediate_size": 16}
    results = pool.run(4, expert_models.train_with_experts, names, 6, 2, options, 3, timeout=2 * RUN_S)
    differences = expert_models.differences(names, results)
    record_property("equal", not differences)
    assert not differences, differences


OVERFLOWS = [Fault(4, 1, 0, math.nan), Fault(8, 1, 1, math.inf), Fault(9, 0, 2, math.nan)]
SPIKES = [Fault(4, 1, 0, 1e6), Fault(8, 0, 1, 1e6)]
POST_VALIDATION = {
    "fp16, NaN": ("zb-h2", f"{FP16} --loss-scale-window 7", OVERFLOWS, {"ahead", "repeated", "skipped"}),
    "bf16, clipped": ("zb-v", f"--bf16 {UNTIED}", SPIKES, {"ahead", "repeated"}),
}


@pytest.mark.parametrize("name", POST_VALIDATION)
def test_post_validation_undoes_steps(pool: RankPool, record_property: Record, name: str) -> None:
    """Steps taken ahead of a planted NaN, or of a norm that must be clipped, are undone: as with a synchronous step."""
    schedule, options, faults, expected = POST_VALIDATION[name]
    layout = Layout(2, num_layers=4)
    flags = f"{layout.flags(3, options)} --zero-bubble-schedule {schedule} --clip-grad 100 --train-iters 12 {ON}"
    modes = ["", "--zero-bubble-post-validation"]
    results = pool.run(2, train_with_faults, flags, modes, faults, True, timeout=RUN_S)
    counts: Counter[str] = sum((ahead.counts for _, ahead in results), Counter())
    record_property("steps", dict(counts))
    assert_same_bits(results, modes, 12)
    assert expected <= counts.keys(), counts


def test_post_validation_undoes_steps_by_inversion(pool: RankPool, record_property: Record) -> None:
    """Early steps are not inverted, because they lose too many bits."""
    flags = f"{Layout(2).flags(3, UNTIED)} --zero-bubble-schedule zb-h2 --clip-grad 100 --train-iters 30 {ON}"
    modes = [f"--zero-bubble-post-validation --zero-bubble-rollback {how}" for how in ("exact", "inverse")]
    faults = [Fault(20, 1, 0, 1e6), Fault(26, 1, 2, 1e6)]
    results = pool.run(2, train_with_faults, flags, modes, faults, True, timeout=RUN_S)
    counts: Counter[str] = sum((inverse.counts for _, inverse in results), Counter())
    record_property("steps", dict(counts))
    assert counts["repeated"], counts
    for exact, inverse in results:
        assert figures(inverse)["grad_norms"] == pytest.approx(figures(exact)["grad_norms"], rel=1e-3)


JOB = f"--mock-data --num-layers 8 --attention-dropout 0 --hidden-dropout 0 {ON}"


def test_checkpoint_is_written_under_zb_v_and_read_under_1f1b(
    pool: RankPool, record_property: Record, tmp_path: Path
) -> None:
    vee = f"{JOB} --pipeline-model-parallel-size 2 --zero-bubble-schedule zb-v"
    linear = f"{JOB} --pipeline-model-parallel-size 2 --zero-bubble-schedule 1f1b"
    train_job(pool, 2, f"{vee} --save {tmp_path}/saved --exit-interval 3", tmp_path / "begun")
    kept = losses(train_job(pool, 2, f"{vee} --load {tmp_path}/saved", tmp_path / "kept"))
    moved = losses(train_job(pool, 2, f"{linear} --load {tmp_path}/saved", tmp_path / "moved"))
    record_property("losses", [[float(values[0]) for values in run.values()] for run in (kept, moved)])
    assert list(kept) == list(moved) == [4, 5, 6]
    for iteration, (loss, *_) in kept.items():  # the norm, and with it a clipped step, is equal up to rounding
        assert moved[iteration][0] == pytest.approx(loss, rel=1e-5)


def test_evaluation_traces_and_costs_are_written(pool: RankPool, tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    flags = f"{JOB} --pipeline-model-parallel-size 2 --zero-bubble-schedule zb-h1 --eval-iters 1 --eval-interval 3"
    files = f"--zero-bubble-trace {tmp_path}/trace --zero-bubble-record-costs {costs}"
    lines = train_job(pool, 2, f"{flags} {files}", tmp_path / "metrics")
    assert [line["lm_loss"] for line in lines if line["kind"] != "train"], lines
    written = json.loads(costs.read_text())
    assert all(ms > 0 for key in ("forward_ms", "backward_ms", "wgrad_ms") for ms in written[key]), written
    assert json.loads((tmp_path / "trace/trace.json").read_text())["measured"]["bubble_rate_makespan"] < 1


def reduce_alone(_rank: int) -> tuple[list[float], list[int]]:
    """In a world of one rank: sum figures as an optimizer step does, and create the groups of a pipeline."""
    from megatron.zero_bubble.engine.optimizer.global_state import Reduction
    from megatron.zero_bubble.engine.runtime.groups import new_group

    backend = torch.distributed.get_backend()
    group = new_group([0], backend)
    tensor = torch.tensor([1.5, 2.5], device=DEVICE)
    reduced = Reduction(tensor, torch.distributed.ReduceOp.SUM, group).wait()
    return reduced, torch.distributed.get_process_group_ranks(group)


def test_one_rank_sets_up_its_groups() -> None:
    """NCCL with one GPU: set-up of groups and a reduction work, although nothing can be sent."""
    alone = RankPool(install_cpu_platform if ON_CPU else nothing, Group() if ON_CPU else Group("nccl"), forked=ON_CPU)
    try:
        assert alone.run(1, reduce_alone) == [([1.5, 2.5], [0])]
    finally:
        alone.close()


def test_killed_rank_ends_the_others(tmp_path: Path, record_property: Record) -> None:
    if NUM_RANKS < 2:
        pytest.skip("NCCL needs one GPU per rank")
    layout = Layout(2)
    flags = f"{BASE_FLAGS} {layout.flags(8)} --zero-bubble-schedule zb-h1 {ON} --log-interval 1".split()
    ended = run_training(2, flags, tmp_path, Death(1, BACKWARD, call=20), forked=ON_CPU)
    record_property("ended_s", ended[0].ended_s)
    assert ended[1].exit_code == -signal.SIGKILL
    assert ended[0].exit_code != 0 and ended[0].ended_s < LIMIT_S
    assert "rank 1" in ended[0].output, ended[0].output
