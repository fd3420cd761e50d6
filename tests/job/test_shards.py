"""Which jobs can shard their weights."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.ir import Placement
from megatron.zero_bubble.job.flags import StrictParser, add_flags, config_of
from megatron.zero_bubble.job.rules import Job, check_flags
from megatron.zero_bubble.job.shards import check_shards
from megatron.zero_bubble.plan.shard import check_chunks


@pytest.mark.parametrize(
    ("option", "value", "what"),
    [
        ("use_distributed_optimizer", False, "=True, because each replica steps its own shard; got False; give --use-"),
        ("overlap_grad_reduce", True, "=False, because .*; got True; drop --overlap-grad-reduce"),
        ("overlap_param_gather", True, "=False, because .*; got True; drop --overlap-param-gather"),
        ("save_wgrads_interval", 5, "=None, because every replica has only its shard of the gradients; got 5; drop"),
        ("fp8", "e4m3", "=None, because .*; got 'e4m3'; drop --fp8-format"),
        ("num_moe_experts", 4, "=None, because .*; got 4; drop --num-experts"),
        ("num_experts", 4, "=None, because .*; got 4; drop --num-experts"),
        ("mtp_num_layers", 1, "=None, because .*; got 1; drop --mtp-num-layers"),
        ("context_parallel_size", 2, "=1, because .*; got 2; drop --context-parallel-size"),
        ("num_distributed_optimizer_instances", 2, "=1, because .*; got 2; drop --num-distributed-optimizer"),
        ("nccl_ub", True, "=False, because .*; got True; drop --use-nccl-ub"),
        ("optimizer_cpu_offload", True, "=False, because .*; got True; drop --optimizer-cpu-offload"),
        ("defer_embedding_wgrad_compute", True, "=False, because .* would not be reduced; got True; drop"),
    ],
)
def test_unsupported_options_are_refused(option: str, value: object, what: str) -> None:
    check_shards(SimpleNamespace())
    check_shards(SimpleNamespace(**{option: None}))
    with pytest.raises(UserError, match=f"sharded units need {option}{what}"):
        check_shards(SimpleNamespace(**{option: value}))


def test_one_stage_per_rank_is_refused() -> None:
    check_chunks(Placement.interleaved(2, 2))
    with pytest.raises(UserError, match="sharded units need 2 or more stages per rank, .* got 1; choose a schedule"):
        check_chunks(Placement.linear(2))


def parsed(words: str) -> SimpleNamespace:
    parser = StrictParser(allow_abbrev=False)
    add_flags(parser)
    return parser.parse_args(words.split(), SimpleNamespace())  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize(
    ("flags", "under_launcher", "what"),
    [
        ("--zero-bubble-shard-weights", False, "has no effect without a zero-bubble schedule"),
        (
            "--zero-bubble-whole-stages 1 --zero-bubble-schedule zero-pp",
            True,
            "is for --zero-bubble-shard-weights; drop",
        ),
        ("--zero-bubble-unit-microbatches 4 --zero-bubble-schedule zb-h1", False, "is for zero-pp, .* got zb-h1; drop"),
        ("--zero-bubble-unit-microbatches auto", True, "is for zero-pp, .* got none; drop"),
    ],
)
def test_flags_without_effect_are_refused(flags: str, under_launcher: bool, what: str) -> None:
    with pytest.raises(UserError, match=what):
        check_flags(Job(parsed(flags), under_launcher))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["0", "-1", "two", ""])
def test_unit_must_be_a_number_or_auto(text: str) -> None:
    with pytest.raises(UserError, match="a unit has 1 or more microbatches, or auto; got"):
        parsed(f"--zero-bubble-unit-microbatches={text}")


def test_flags_become_a_configuration() -> None:
    sharded = "--zero-bubble-schedule zero-pp --zero-bubble-shard-weights --zero-bubble-unit-microbatches"
    for text, unit in (("6", 6), ("auto", None)):
        config = config_of(parsed(f"{sharded} {text}"))  # type: ignore[arg-type]
        assert config.shard_weights and config.unit_microbatches == unit
        assert config.sharding(4).unit_microbatches == (unit or 1)  # chosen units of zero-pp end by themselves
        row = config.sources()(2).make(12).order[0]
        assert [p.microbatch for p in row if p.stage == 0][: unit or 2] == list(range(unit or 2))
