import argparse
from pathlib import Path

import pytest

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.planning.decisions import DECISIONS, REMOVED
from megatron.zero_bubble.planning.job.arguments.config_file import RIVALS
from megatron.zero_bubble.planning.job.arguments.parser import build_parser, parse, parse_megatron
from megatron.zero_bubble.planning.job.flags import full_help, parse_ours

# New flags are deliberate: add them here, and explain in the commit message why no flag of Megatron suffices.
OURS = """
--config --metrics-file --no-dist-ckpt-optim-fully-reshardable --no-zero-bubble-fuse-wgrad
--zero-bubble-attention-share --zero-bubble-balance-microbatches --zero-bubble-costs
--zero-bubble-device --zero-bubble-exact
--zero-bubble-fuse-wgrad --zero-bubble-help-all
--zero-bubble-host-memory --zero-bubble-keep-faster --zero-bubble-log-bubble --zero-bubble-memory-limit
--zero-bubble-nccl-collective-ctas --zero-bubble-nccl-ctas
--zero-bubble-num-chunks --zero-bubble-num-slices --zero-bubble-offload --zero-bubble-overlap-experts
--zero-bubble-placement
--zero-bubble-post-receives --zero-bubble-post-validation --zero-bubble-recompute --zero-bubble-recompute-logits
--zero-bubble-record-costs --zero-bubble-rollback --zero-bubble-schedule --zero-bubble-schedule-file
--zero-bubble-shard-transport --zero-bubble-shard-weights --zero-bubble-slice-ends --zero-bubble-slices
--zero-bubble-trace
--zero-bubble-trace-iterations
--zero-bubble-unit-microbatches --zero-bubble-vocabulary-parallel
--zero-bubble-whole-stages
"""
MEGATRONS = """
--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --accumulate-allreduce-grads-in-fp32
--adam-beta1 --adam-beta2 --adam-eps --add-qkv-bias --attention-backend --attention-dropout --attention-softmax-in-fp32
--bf16 --calculate-per-token-loss --ckpt-format --clip-grad --cross-entropy-loss-fusion --cuda-graph-impl
--data-cache-path --data-path
--ddp-bucket-size --decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers --disable-bias-linear
--dist-ckpt-optim-fully-reshardable --distributed-backend --distributed-timeout-minutes --eod-mask-loss --eval-interval
--eval-iters --exit-interval --exit-on-missing-checkpoint --exit-signal-handler --expert-model-parallel-size
--expert-tensor-parallel-size --ffn-hidden-size --finetune --fp16 --global-batch-size --grad-reduce-in-bf16
--group-query-attention --hidden-dropout --hidden-size --hysteresis --init-method-std --initial-loss-scale --kv-channels
--load --log-interval --log-num-zeros-in-grad --loss-scale --loss-scale-window --lr --lr-decay-iters --lr-decay-style
--lr-warmup-fraction --lr-warmup-init --lr-warmup-iters --make-vocab-size-divisible-by --max-position-embeddings
--micro-batch-size --min-loss-scale --min-lr --mock-data --moe-aux-loss-coeff --moe-ffn-hidden-size --moe-grouped-gemm
--moe-router-dtype --moe-router-load-balancing-type --moe-router-pre-softmax --moe-router-topk
--moe-shared-expert-intermediate-size
--moe-token-dispatcher-type --moe-z-loss-coeff --no-align-grad-reduce --no-align-param-gather --no-bias-dropout-fusion
--no-bias-gelu-fusion --no-bias-swiglu-fusion --no-check-for-nan-in-loss-and-grad --no-gradient-accumulation-fusion
--no-load-optim --no-load-rng --no-masked-softmax-fusion --no-mmap-bin-files --no-overlap-p2p-communication
--no-persist-layer-norm --no-rope-fusion --no-save-optim --no-save-rng --norm-epsilon --normalization
--num-attention-heads --num-experts --num-layers --num-query-groups --num-virtual-stages-per-pipeline-rank --num-workers
--optimizer --overlap-grad-reduce --overlap-param-gather --pipeline-model-parallel-layout --pipeline-model-parallel-size
--position-embedding-type --qk-layernorm --rampup-batch-size --recompute-activations --recompute-granularity
--recompute-method --recompute-modules --recompute-num-layers --reset-attention-mask --reset-position-ids --rotary-base
--rotary-percent --save --save-interval --seed --seq-length --sequence-parallel --sgd-momentum --split --squared-relu
--swiglu --tensor-model-parallel-size --tensorboard-dir --test-data-path --tokenizer-type --train-data-path
--train-iters --transformer-impl --untie-embeddings-and-output-weights --use-distributed-optimizer --valid-data-path
--vocab-size --weight-decay
"""


def test_flags_are_exactly_the_listed_ones() -> None:
    found = {option for action in build_parser()._actions for option in action.option_strings} - {"-h", "--help"}
    removed = {f"--zero-bubble-{flag}" for flag in REMOVED}
    assert found >= removed, "they are refused with the reason"
    assert sorted(found - removed) == sorted((OURS + MEGATRONS).split())


def test_every_flag_has_a_description_with_its_default() -> None:
    parser = build_parser()
    full_help(parser)
    for action in parser._actions:
        assert action.help, action.option_strings
        if action.default not in (None, False, True, argparse.SUPPRESS):
            assert "default: " in action.help, action.option_strings


def test_help_shows_the_core_and_all_of_the_rest_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    text = build_parser().format_help()
    core = [option for option in DECISIONS if option.tier == "core"]
    for option in DECISIONS:
        assert (f"\n  --zero-bubble-{option.flag}" in text) is (option.tier == "core"), option.flag
    assert len(core) <= 9 and "\n  --zero-bubble-help-all" in text
    for command in (parse, parse_ours):
        with pytest.raises(SystemExit) as ended:
            command(["--zero-bubble-help-all"])
        printed = capsys.readouterr().out
        assert ended.value.code == 0
        assert all(f"\n  --zero-bubble-{option.flag}" in printed for option in DECISIONS)


def test_mutually_exclusive_names_are_flags() -> None:
    assert {f"--{name}" for rivals in RIVALS for name in rivals} <= set((OURS + MEGATRONS).split())


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--no-such-flag", "1"], "unrecognized arguments: --no-such-flag 1"),
        (["--num-layer", "4"], "unrecognized arguments: --num-layer 4"),
        (["--num-layers", "four"], "argument --num-layers: invalid int value: 'four'"),
        (["--bf16", "yes"], "unrecognized arguments: yes"),
        (["--zero-bubble-device", "tpu"], "invalid choice: 'tpu'"),
        (
            ["--zero-bubble-trace-iterations", "3,5-"],
            "iterations must be positive numbers or ranges of them, such as 10-12,50; got '3,5-'",
        ),
        (["--zero-bubble-trace-iterations", "0-3"], "must be positive numbers or ranges"),
        (["--zero-bubble-trace-iterations", "5-3"], "must be positive numbers or ranges"),
        (["--zero-bubble-trace-iterations", "7,1-1000"], "at most 1000 iterations can be recorded"),
    ],
)
def test_invalid_flag_is_rejected_in_one_sentence(argv: list[str], words: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(argv)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_iteration_ranges_are_parsed() -> None:
    flags = ["--zero-bubble-schedule", "zb-h1", "--zero-bubble-trace", "x", "--zero-bubble-trace-iterations"]
    listed = parse([*flags, "10-12, 50"]).run.observations.trace_iterations
    assert [number for some in listed for number in some] == [10, 11, 12, 50]


class TestConfigFile:
    def write(self, folder: Path, text: str) -> str:
        file = folder / "job.yaml"
        file.write_text(text)
        return str(file)

    def parse(self, folder: Path, text: str, *argv: str) -> argparse.Namespace:
        return parse(["--config", self.write(folder, text), *argv])

    def test_values_of_every_kind_are_parsed(self, tmp_path: Path) -> None:
        args = self.parse(
            tmp_path, "num-layers: 4\nlr: 1e-3\nswiglu: true\nbf16: false\nseed:\ntrain-data-path: [0.3, a, 0.7, b]\n"
        )
        assert (args.num_layers, args.lr, args.swiglu, args.bf16, args.seed) == (4, 1e-3, True, False, 1234)
        assert args.train_data_path == ["0.3", "a", "0.7", "b"]

    def test_explicit_flags_override_the_file(self, tmp_path: Path) -> None:
        assert self.parse(tmp_path, "num-layers: 4\nlr: 1.0\n", "--num-layers", "8").num_layers == 8

    @pytest.mark.parametrize("source", [["--data-path", "mine"], ["--data-path=mine"], ["--mock-data"]])
    def test_mutually_exclusive_flag_overrides_the_file(self, tmp_path: Path, source: list[str]) -> None:
        args = self.parse(tmp_path, "train-data-path: data/a\nvalid-data-path: data/b\nnum-layers: 4\n", *source)
        assert args.train_data_path is None and args.valid_data_path is None
        assert args.num_layers == 4

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("no-such-flag: 1\n", "job.yaml: unrecognized arguments: --no-such-flag 1"),
            ("num-layers: four\n", "job.yaml: argument --num-layers: invalid int value"),
            ("num_layers: 4\n", "without leading dashes"),
            ("--num-layers: 4\n", "without leading dashes"),
            ("config: other.yaml\n", "cannot include another one"),
            ("- 1\n- 2\n", "must map flags to values"),
            ("a: [1\n", "must be YAML"),
            ("\xff", "must map flags to values"),
        ],
    )
    def test_invalid_file_is_rejected_in_one_sentence(self, tmp_path: Path, text: str, words: str) -> None:
        with pytest.raises(UserError) as caught:
            self.parse(tmp_path, text)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_missing_file_is_rejected(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"cannot be read: .*absent\.yaml \(No such file"):
            parse(["--config", str(tmp_path / "absent.yaml")])


@pytest.mark.parametrize(
    ("flags", "word", "flag"),
    [
        ("--seed 1 2.4B:320", "2.4B:320", "--seed"),
        ("--bf16 true --seed 1", "true", "--bf16"),
        ("--seed=1 2", "2", "--seed"),
        ("--lr -1 2 --seed 1", "2", "--lr"),
    ],
)
def test_words_that_belong_to_no_flag_are_refused_as_megatron_does(flags: str, word: str, flag: str) -> None:
    with pytest.raises(UserError, match=f"got '{word}' after {flag}, which takes fewer"):
        parse_megatron(flags.split())


def test_flags_that_only_megatron_knows_may_have_several_values() -> None:
    flags = "--spec a b --rampup-batch-size 1 2 3 --data-path 1 a 2 b --recompute-modules mlp moe --lr -1"
    assert parse_megatron(flags.split())[1] == ("--spec",)
