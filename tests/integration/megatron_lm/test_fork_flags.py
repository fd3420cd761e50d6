"""Flags of the authors' fork are replaced by ours."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.integration.megatron_lm.fork_flags import modernize
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig
from megatron.zero_bubble.planning.job.flags import parse_ours

PIPELINE = "--pipeline-model-parallel-size 8"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--enable-zero-bubble", "--zero-bubble-schedule zb-auto --zero-bubble-memory-limit 1p"),
        (
            f"--enable-zero-bubble --zero-bubble-max-pending-backward 16 {PIPELINE}",
            f"{PIPELINE} --zero-bubble-schedule zb-auto --zero-bubble-memory-limit 2p",
        ),
        (
            f"--enable-zero-bubble --zero-bubble-max-pending-backward=12 {PIPELINE}",
            f"{PIPELINE} --zero-bubble-schedule zb-auto --zero-bubble-memory-limit 1.5p",
        ),
        (
            "--enable-zero-bubble --zero-bubble-max-pending-backward auto",
            "--zero-bubble-schedule zb-auto --zero-bubble-memory-limit 1p",
        ),
        ("--enable-zero-bubble --zero-bubble-v-schedule", "--zero-bubble-schedule zb-v"),
        ("--zero-bubble-v-schedule --zero-bubble-v-schedule-mem-setup zb", "--zero-bubble-schedule zb-v"),
        ("--zero-bubble-v-schedule --zero-bubble-v-schedule-mem-setup half", "--zero-bubble-schedule v-half"),
        ("--zero-bubble-v-schedule --zero-bubble-v-schedule-mem-setup min", "--zero-bubble-schedule v-min"),
        (
            "--zero-bubble-v-schedule --enable-optimizer-post-validation --enable-exactly-numeric-match",
            "--zero-bubble-schedule zb-v --zero-bubble-post-validation exact",
        ),
        ("--allow-padding-num-layers --enable-zb-runtime --lr 1", "--lr 1"),
        ("--zero-bubble-pipeline-timers-start-iter 5 --zero-bubble-pipeline-timers-end-iter 9", ""),
        ("--zero-bubble-v-schedule-mem-setup half", ""),
        ("--enable-exactly-numeric-match", ""),
    ],
)
def test_fork_flags_are_translated(old: str, new: str) -> None:
    arguments, said = modernize(old.split())
    assert arguments == new.split()
    assert said


def test_other_flags_are_unchanged() -> None:
    flags = [*PIPELINE.split(), "--lr", "1", "--zero-bubble-schedule", "zb-h1"]
    assert modernize(flags) == (flags, [])


def test_every_translation_is_reported_once() -> None:
    old = "--enable-zero-bubble --enable-optimizer-post-validation --allow-padding-num-layers"
    assert modernize(old.split())[1] == [
        "--enable-zero-bubble is replaced by --zero-bubble-schedule zb-auto --zero-bubble-memory-limit 1p",
        "--enable-optimizer-post-validation is replaced by --zero-bubble-post-validation",
        (
            "--allow-padding-num-layers is no longer needed: stages get a balanced layout if the layers do not "
            "divide evenly"
        ),
    ]


@pytest.mark.parametrize(
    ("old", "sentence"),
    [
        (
            "--enable-1f1b-v",
            "--enable-1f1b-v of the authors' fork has no equivalent; give --zero-bubble-schedule v-half",
        ),
        ("--num-seq-splits 2", "give --zero-bubble-schedule seq-1f1b and --zero-bubble-slices"),
        ("--offload-chunk-num 2", "give --zero-bubble-offload with the share of the chunks, 50% for example"),
        ("--offload-time 0.7", "--offload-time of .* no equivalent; drop it: --zero-bubble-offload needs no time"),
        ("--auto-offload-time", "drop it: --zero-bubble-offload needs no time"),
        ("--cpu-offload", "no equivalent; give --zero-bubble-offload auto"),
        ("--recompute-lgd", "give --recompute-granularity selective and --recompute-modules layernorm mlp"),
        ("--offload-overlap-sr", "drop it: --zero-bubble-offload runs all copies in order"),
        ("--enable-zero-bubble --zero-bubble-schedule zb-h1", "got both; drop the fork's"),
        (f"--enable-zero-bubble --zero-bubble-max-pending-backward x {PIPELINE}", "got 'x' and .* 8; give"),
        ("--enable-zero-bubble --zero-bubble-max-pending-backward 8", "got '8' and .* None; give"),
        ("--zero-bubble-v-schedule --zero-bubble-v-schedule-mem-setup most", "invalid choice: 'most'"),
    ],
)
def test_untranslatable_flags_are_rejected(old: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        modernize(old.split())


def test_parse_ours_separates_our_flags_from_others() -> None:
    run, others = parse_ours(["--lr", "1", "--zero-bubble-schedule", "zb-h1", "--zero-bubble-exact", "--bf16"])
    assert others == ["--lr", "1", "--bf16"]
    config = ZeroBubbleConfig.of(run, peer_timeout_s=5)
    assert (config.setup.name, config.setup.exact, config.peer_timeout_s) == ("zb-h1", True, 5)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--zero-bubble-shedule zb-h1", "unknown flag --zero-bubble-shedule; --zero-bubble-help-all lists"),
        ("--zero-bubble-device gpu", "invalid choice: 'gpu'"),
    ],
)
def test_misspelt_flags_are_rejected(flags: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        parse_ours(flags.split())
