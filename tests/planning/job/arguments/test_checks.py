import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.zero_bubble import PassCosts, build, simulate
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.plan import plan_to_json
from megatron.zero_bubble.planning.job import installed
from megatron.zero_bubble.planning.job.arguments import data_checks, model_checks
from megatron.zero_bubble.planning.job.arguments.checks import check
from megatron.zero_bubble.planning.job.arguments.parser import parse
from megatron.zero_bubble.planning.setup import Searched, Setup

REPOSITORY = Path(__file__).resolve().parents[4]
BASE = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --train-iters 10 "
    "--lr 1e-3 --mock-data"
)

RAMP_UP = "--global-batch-size 8 --rampup-batch-size 2 2 9"
VOCABULARY = "--pipeline-model-parallel-size 2 --zero-bubble-schedule zb-h1 --zero-bubble-vocabulary-parallel 1"
INTERLEAVED = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"


def checked(flags: str = "", world_size: int = 1, base: str = BASE) -> argparse.Namespace:
    args = parse([*base.split(), *flags.split()])
    check(args, world_size)
    return args


def refusal(flags: str, world_size: int = 1, base: str = BASE) -> str:
    with pytest.raises(UserError) as caught:
        checked(flags, world_size, base)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_derived_values_are_filled_in() -> None:
    args = checked("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --lr-warmup-fraction 0.2", 8)
    assert args.data_parallel_size == 2
    assert args.global_batch_size == 4
    assert args.max_position_embeddings == 32
    assert (args.lr_decay_iters, args.lr_warmup_iters) == (10, 2)


def test_sequence_parallelism_is_off_with_one_tensor_parallel_rank() -> None:
    """As in Megatron-LM, with a line that a run and its dry run print."""
    args = parse([*BASE.split(), "--sequence-parallel"])
    assert check(args, 1) == [
        "--sequence-parallel has no effect with --tensor-model-parallel-size 1, as in Megatron-LM"
    ]
    assert not args.sequence_parallel
    args = parse([*BASE.split(), "--sequence-parallel", "--tensor-model-parallel-size", "2"])
    assert check(args, 2) == [] and args.sequence_parallel


def test_dynamic_loss_scaling_disables_the_nan_check() -> None:
    assert not checked("--fp16").check_for_nan_in_loss_and_grad
    assert checked("--fp16 --loss-scale 128").check_for_nan_in_loss_and_grad
    assert checked("--bf16").check_for_nan_in_loss_and_grad


@pytest.mark.parametrize(
    ("flags", "world_size", "words"),
    [
        ("--num-layers 0", 1, "--num-layers must be positive, got 0"),
        ("--clip-grad -1", 1, "--clip-grad must not be negative, got -1.0"),
        ("--pipeline-model-parallel-size 3", 4, "divisible by tensor * pipeline parallel size, got 4 and 1 * 3"),
        ("--sequence-parallel --tensor-model-parallel-size 4 --seq-length 30", 4, "got 30 and 4"),
        ("--pipeline-model-parallel-size 3", 3, "got 8 layers for 3 stages; use 9 layers"),
        ("--pipeline-model-parallel-size 4 --num-layers 2", 4, "got 2 layers for 4 stages; use 4 layers"),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3", 2, "got 8 layers for 6 stages"),
        ("--num-virtual-stages-per-pipeline-rank 2", 1, "needs 2 or more pipeline ranks, got 2 and 1"),
        (
            "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 1",
            4,
            "got 7 layers for 3 stages (first or last rank excluded)",
        ),
        ("--decoder-last-pipeline-num-layers 1", 1, "need 2 or more pipeline ranks"),
        ("--hidden-size 66", 1, "--hidden-size must be divisible by --num-attention-heads, got 66 and 4"),
        ("--tensor-model-parallel-size 8", 8, "--num-attention-heads must be divisible"),
        ("--group-query-attention --num-query-groups 3", 1, "--num-query-groups must divide"),
        ("--max-position-embeddings 16", 1, "must be at least --seq-length, got 16 and 32"),
        ("--global-batch-size 6", 2, "got 6 and 2 * 2; use 4"),
        ("--rampup-batch-size 2 4 10 --global-batch-size 8", 1, "got 2 4 10 with global batch size 8"),
        (
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 6",
            2,
            "divisible by the number of pipeline ranks, got 3 and 2",
        ),
        (
            f"{INTERLEAVED} --global-batch-size 8 --rampup-batch-size 2 2 9",
            2,
            "divisible by the number of pipeline ranks, got 1 and 2; change --global-batch-size or --rampup-batch-size",
        ),
        (
            "--recompute-granularity selective --recompute-modules mlp layernorm --transformer-impl local",
            1,
            "layernorm needs",
        ),
        (
            "--pipeline-model-parallel-size 2 --zero-bubble-schedule zb-auto --num-virtual-stages-per-pipeline-rank 4",
            2,
            "the schedule has 1 stage per rank, the job 4; drop --num-layers-per-virtual-pipeline-stage",
        ),
        (
            "--pipeline-model-parallel-size 2 --zero-bubble-schedule zb-v --pipeline-model-parallel-layout Et*4|t*4L",
            2,
            (
                "the schedule has 2 stages per rank, the layout of the job 1; give a layout of 4 stages: "
                "--pipeline-model-parallel-layout 'Ett|tt|t*3|tL'"
            ),
        ),
        (
            f"{INTERLEAVED} --zero-bubble-schedule interleaved-1f1b --pipeline-model-parallel-layout Et*4|t*4L",
            2,
            "the layout of the job 1; give a layout of 4 stages",
        ),
        (
            "--pipeline-model-parallel-size 2 --zero-bubble-schedule breadth-first --zero-bubble-record-costs x.json",
            2,
            "needs a schedule that splits every backward into B and W, got breadth-first",
        ),
        ("--recompute-granularity selective --recompute-modules mlp", 1, "mlp needs --disable-bias-linear"),
        ("--group-query-attention --num-query-groups 0", 1, "--num-query-groups must be positive, got 0"),
        ("--expert-model-parallel-size 2", 2, "needs experts"),
        ("--num-experts 3 --expert-model-parallel-size 2", 2, "got 3 and 2"),
        ("--num-experts 1", 1, "--moe-router-topk must be at most --num-experts, got 2 and 1"),
        (
            "--num-experts 4 --tensor-model-parallel-size 2",
            2,
            "--num-experts with tensor parallelism needs --sequence-parallel",
        ),
        ("--num-experts 8 --expert-model-parallel-size 8", 4, "expert-tensor * expert * pipeline parallel size, got 4"),
        ("--overlap-param-gather", 1, "needs --use-distributed-optimizer and --overlap-grad-reduce"),
        ("--use-distributed-optimizer --optimizer sgd", 1, "--use-distributed-optimizer needs --optimizer adam"),
        ("--bf16 --fp16", 1, "mutually exclusive"),
        ("--min-lr 1", 1, "--min-lr must be at most --lr, got 1.0 and 0.001"),
        ("--lr-warmup-iters 10", 1, "must be shorter than --lr-decay-iters, got 10 and 10"),
        ("--lr-warmup-fraction 1.5", 1, "must be in [0, 1)"),
        ("--tokenizer-type NullTokenizer", 1, "needs --vocab-size"),
        ("--vocab-size 100", 1, "add --tokenizer-type NullTokenizer"),
        ("--split 0,1,0", 1, "the first of them positive"),
        ("--split a,b", 1, "the first of them positive"),
        ("--load x --optimizer sgd", 1, "add --no-load-optim"),
        ("--zero-bubble-schedule zb-h1 --zero-bubble-schedule-file x", 1, "the schedule is given twice"),
        ("--zero-bubble-schedule zb-h1", 1, "needs a pipeline of 2 or more ranks"),
        (
            "--pipeline-model-parallel-size 2 --zero-bubble-schedule zb-h1 --zero-bubble-nccl-ctas 0",
            2,
            "nccl_ctas must be positive; got 0",
        ),
        (f"{VOCABULARY} --zero-bubble-nccl-collective-ctas 0", 2, "nccl_collective_ctas must be positive; got 0; give"),
        (
            f"{VOCABULARY} --zero-bubble-shard-weights",
            2,
            "--zero-bubble-shard-weights and --zero-bubble-vocabulary-parallel 1; leave",
        ),
        ("--zero-bubble-placement linear", 1, "--zero-bubble-placement linear works only with zb-auto, because"),
        (
            f"{INTERLEAVED} --zero-bubble-schedule zero-pp {RAMP_UP} --zero-bubble-memory-limit 0.6p",
            2,
            "activations of some size of units must fit into the memory limit of 0.6p",
        ),
        (
            f"{INTERLEAVED} --zero-bubble-schedule zero-pp --zero-bubble-record-costs x --zero-bubble-costs ./x",
            2,
            "--zero-bubble-record-costs and --zero-bubble-costs must name different files",
        ),
        (
            "--pipeline-model-parallel-size 2 --zero-bubble-schedule zb-v --no-overlap-p2p-communication",
            2,
            "--no-overlap-p2p-communication does not work with a zero-bubble schedule",
        ),
        (
            "--pipeline-model-parallel-size 2 --zero-bubble-schedule-file /no/such/file",
            2,
            "cannot read the schedule file /no/such/file: No such file or directory; check the path",
        ),
        (
            "--pipeline-model-parallel-size 2 --zero-bubble-schedule zb-h1 --zero-bubble-record-costs /",
            2,
            "needs a file, got the folder /; name a file",
        ),
        (
            "--pipeline-model-parallel-size 2 --zero-bubble-schedule 1f1b --zero-bubble-record-costs file",
            2,
            "needs a schedule that splits every backward into B and W, got 1f1b",
        ),
    ],
)
def test_violated_rule_is_rejected_in_one_sentence(flags: str, world_size: int, words: str) -> None:
    assert words in refusal(flags, world_size)


@pytest.mark.parametrize(
    "flags",
    [
        "--zero-bubble-trace x --zero-bubble-log-bubble --zero-bubble-trace-iterations 2",
        "--zero-bubble-schedule zb-auto --zero-bubble-placement vee --zero-bubble-memory-limit 0.5p",
        "--zero-bubble-schedule zb-auto --zero-bubble-record-costs x",
        "--zero-bubble-schedule zb-h2 --zero-bubble-post-validation --zero-bubble-rollback exact",
        "--zero-bubble-schedule 1f1b --no-zero-bubble-fuse-wgrad --zero-bubble-trace x --zero-bubble-log-bubble",
    ],
)
def test_effective_flags_are_accepted(flags: str) -> None:
    checked(f"--pipeline-model-parallel-size 2 {flags}", 2)


def test_omitted_flags_get_defaults() -> None:
    config = checked("--pipeline-model-parallel-size 2 --zero-bubble-schedule zb-auto", 2).zero_bubble
    assert config.setup == Setup(Searched())
    assert config.setup.messages.receives == "early" and config.ctas == (2, 8)


def test_flags_of_a_configuration_file_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("zero-bubble-memory-limit: 1p\n")
    assert "--zero-bubble-memory-limit 1p works only with" in refusal(f"--config {file}")


@pytest.fixture
def schedule_file(tmp_path: Path) -> Callable[..., str]:
    def write(name: str, num_ranks: int = 2, num_microbatches: int = 4) -> str:
        schedule = build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
        file = tmp_path / "plan.json"
        file.write_text(plan_to_json(simulate(schedule, PassCosts.uniform(schedule.placement, 1.0, 1.0, 1.0))))
        return f"--pipeline-model-parallel-size 2 --zero-bubble-schedule-file {file}"

    return write


class TestScheduleFile:
    """Schedule files; a microbatch has 2 samples."""

    @pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "breadth-first", "dualpipe-v"])
    def test_record_costs_rejects_schedules_with_fused_backwards(
        self, schedule_file: Callable[..., str], name: str
    ) -> None:
        flags = f"{schedule_file(name)} --global-batch-size 8 --zero-bubble-record-costs x"
        assert "splits every backward into B and W, got" in refusal(flags, 2)

    def test_record_costs_accepts_split_backwards(self, schedule_file: Callable[..., str]) -> None:
        checked(f"{schedule_file('zb-v')} --global-batch-size 8 --zero-bubble-record-costs x", 2)

    @pytest.mark.parametrize("name", ["interleaved-1f1b", "dualpipe-v"])
    def test_record_costs_rejects_named_schedules_with_fused_backwards(self, name: str) -> None:
        flags = f"--pipeline-model-parallel-size 2 --zero-bubble-schedule {name} --global-batch-size 8"
        assert f"W, got {name}; give" in refusal(f"{flags} --zero-bubble-record-costs x", 2)

    def test_matching_size_is_accepted(self, schedule_file: Callable[..., str]) -> None:
        checked(f"{schedule_file('zb-h1')} --global-batch-size 8", 2)

    def test_other_size_is_rejected(self, schedule_file: Callable[..., str]) -> None:
        words = "is for 2 ranks and 4 microbatches, but the job runs 2 pipeline ranks and 6 microbatches"
        assert words in refusal(f"{schedule_file('zb-h1')} --global-batch-size 12", 2)

    def test_batch_ramp_up_is_rejected_with_a_schedule_file(self, schedule_file: Callable[..., str]) -> None:
        flags = f"{schedule_file('zb-h1')} --rampup-batch-size 8 2 24 --global-batch-size 12"
        assert "for 4 microbatches, but this job runs 4, 5 and 6 (batch ramp-up" in refusal(flags, 2)

    def test_batch_ramp_up_is_accepted_with_a_named_schedule(self) -> None:
        flags = "--pipeline-model-parallel-size 2 --zero-bubble-schedule zb-h1"
        checked(f"{flags} --rampup-batch-size 8 4 24 --global-batch-size 12", 2)


def test_missing_flags_are_listed_together() -> None:
    assert "--num-layers, --hidden-size" in refusal("", base="--mock-data --lr 1")


@pytest.mark.parametrize("flags", ["--pipeline-model-parallel-size 8", "--pipeline-model-parallel-size 4"])
def test_divisible_layers_are_accepted(flags: str) -> None:
    assert checked(flags, 8).num_layers == 8


def test_uneven_first_and_last_stages_are_accepted() -> None:
    ends = "--num-layers 8 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1"
    assert checked(f"{ends} --pipeline-model-parallel-size 4", 4).num_layers_in_first_pipeline_stage == 1


class TestData:
    base = BASE.removesuffix(" --mock-data")

    def test_exactly_one_data_source_is_required(self) -> None:
        assert "got 0 of them" in refusal("", base=self.base)
        assert "got 2 of them" in refusal("--data-path a")
        assert "need --train-data-path" in refusal("--valid-data-path a", base=self.base)

    def test_missing_data_file_is_named(self, tmp_path: Path) -> None:
        message = refusal(f"--data-path {tmp_path}/absent", base=self.base)
        assert f"needs the file {tmp_path}/absent.bin, which does not exist" in message
        assert "scripts/prepare_data.py" in message

    def test_every_prefix_of_every_split_is_checked(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[str] = []
        monkeypatch.setattr(data_checks, "check_indexed", seen.append)
        checked("--train-data-path 1 a 2 b --valid-data-path c --test-data-path d e", base=self.base)
        assert seen == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("transformer_engine", "captures CUDA graphs of stages only (local); got transformer_engine"),
        ("local --zero-bubble-device cpu", "local needs GPUs, got the cpu device"),
        ("local --zero-bubble-device cuda", "needs --zero-bubble-schedule, whose stages it records"),
    ],
)
def test_graphs_of_this_script_are_those_of_stages_on_gpus(flags: str, message: str) -> None:
    assert message in refusal(f"--cuda-graph-impl {flags}")


def test_save_to_a_file_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert "must name a directory" in refusal(f"--save {file}")


@pytest.mark.parametrize("package", ["psutil", "transformer_engine"])
def test_missing_package_is_reported_before_training(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """In a run; planning is done on another machine."""
    for module in (model_checks, installed):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    args = checked("--save x" if package == "psutil" else "--transformer-impl transformer_engine")
    assert model_checks.missing_packages(args) == [package]
    with pytest.raises(UserError, match=f"needs the package {package}"):
        model_checks.check_packages(args)


@pytest.mark.parametrize("config", sorted((REPOSITORY / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configurations_are_valid(config: Path) -> None:
    base = f"--config {config}"
    sizes = parse(base.split())
    ranks = sizes.tensor_model_parallel_size * sizes.pipeline_model_parallel_size
    checked("--mock-data --zero-bubble-schedule zb-h1", ranks, base)
