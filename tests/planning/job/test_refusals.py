"""Every row of the tables of refusals refuses what it says, in its own words, and nothing else.

``tests/cli/test_megatron_job.py`` compares the same jobs in a dry run and in a run of a Megatron-LM job.
"""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.planning import plans, vocabulary
from megatron.zero_bubble.planning.codecs import flag_of
from megatron.zero_bubble.planning.decisions import DECISIONS
from megatron.zero_bubble.planning.exclusions import (
    BALANCE,
    EXCLUSIONS,
    FUSED,
    LENGTHS,
    SHARDS,
    UNTOLD_LENGTHS,
    refuse_excluded,
)
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig
from megatron.zero_bubble.planning.job.effects import EFFECTS
from megatron.zero_bubble.planning.job.flags import as_given, given, parse_ours
from megatron.zero_bubble.planning.job.options import OPTIONS, check_options, check_shards
from megatron.zero_bubble.planning.job.planned import adopt
from megatron.zero_bubble.planning.job.rules import Job, check_flags
from megatron.zero_bubble.planning.rule import Choice, Rule, check, chosen
from tests.helpers.refusals import MEGATRONS_VALUES, jobs_of_effects, jobs_of_exclusions, plans_of_exclusions

TIMES = "--num-ranks 3 --num-microbatches 3 --forward-ms 1 --backward-ms 1 --wgrad-ms 1"
UNDER: dict[str, dict[str, Any]] = {
    "stages on a V or in a wave": {"megatrons_own": False},
    "post-validation": {"post_validation": True},
    "sequence slices": {"num_slices": 4},
    "vocabulary parallelism": {"vocabulary": True},
}
"""The arguments of ``check_options`` that a subject needs."""
OTHER_VALUES = {
    "num_distributed_optimizer_instances": 2, "save_wgrads_interval": 5, "num_moe_experts": 4, "num_experts": 4,
    "fp8": "e4m3", "fp4": "e2m1", "cpu_offloading_num_layers": 1, "mtp_num_layers": 1, "context_parallel_size": 2,
}  # fmt: skip


def named(rows: list[tuple[Rule, str]]) -> list[Any]:
    return [pytest.param(*row, id=row[1]) for row in rows]


@pytest.mark.parametrize("rule", OPTIONS, ids=lambda rule: f"{rule.subject.words}: {rule.needs}")
def test_options_of_megatron(rule: Rule) -> None:
    def ask(value: object, **more: Any) -> None:
        values = SimpleNamespace(**{rule.what: value})
        if rule.subject is SHARDS:
            check_shards(values)
        elif rule.subject is BALANCE:
            check(OPTIONS, {"balance_microbatches": True}, values)
        else:
            check_options(values, **more)

    under = UNDER.get(rule.subject.words, {})
    ask(rule.value, **under)
    ask(None, **under)
    other = not rule.value if isinstance(rule.value, bool) else OTHER_VALUES.get(rule.what, "x")
    other = MEGATRONS_VALUES.get(rule.what, other) if isinstance(other, str) else other
    with pytest.raises(UserError) as caught:
        ask(other, **under)
    subject = rule.subject.plural or f"schedules with {rule.subject.words}"
    assert str(caught.value).startswith(f"{subject} need {rule.needs}={rule.value!r}, because ")
    assert str(caught.value).endswith(f"; got {other!r}; {rule.remedy}")
    if under and all(each.needs != rule.needs for each in OPTIONS if each.subject.words not in UNDER):
        ask(other)


@pytest.mark.parametrize(
    ("rule", "words", "under_launcher"),
    [
        pytest.param(rule, words, under, id=f"{words} {'under the launcher' if under else 'in our loop'}")
        for under in (False, True)
        for rule, words in (*jobs_of_effects(under), *jobs_of_exclusions(under))
    ],
)
def test_flags_of_a_job(rule: Rule, words: str, under_launcher: bool) -> None:
    options, _ = parse_ours(words.split())
    job = Job(options, under_launcher, train_iters=10)
    with pytest.raises(UserError) as caught:
        check_flags(job)
    said = rule.sentence(given(options) | job.facts, spell=as_given)
    assert said and str(caught.value) == said
    flags = {row.flag: f"--zero-bubble-{row.flag}" for row in DECISIONS}
    merged = {flags[row.flag]: flag_of(row.name) for row in DECISIONS if row.within}
    assert rule.value is False or str(caught.value).split()[0] in {merged.get(word, word) for word in words.split()}


def configurations() -> list[Any]:
    """The fields of a configuration in the place of the flags, where a rule can be broken by these alone."""
    names = {field.name for field in fields(ZeroBubbleConfig)}
    found = []
    for rule, words in (*jobs_of_effects(False), *jobs_of_exclusions(False)):
        own = {name: value for name, value in given(parse_ours(words.split())[0]).items() if name in names}
        # Of a configuration, fuse_wgrad=True is the default, which cannot contradict anything.
        if rule.sentence(own) and rule.needs is not FUSED and ("schedule" in own or "schedule_file" in own):
            found.append(pytest.param(rule.sentence(own), own, id=words))
    return found


@pytest.mark.parametrize(("sentence", "own"), configurations())
def test_fields_of_a_configuration(sentence: str, own: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        ZeroBubbleConfig(**own)
    assert str(caught.value) == sentence


def test_every_row_has_a_case() -> None:
    assert len(configurations()) >= 20
    of_jobs = [*jobs_of_effects(False), *jobs_of_effects(True), *jobs_of_exclusions(False), *plans_of_exclusions()]
    tested = [rule for rule, _ in of_jobs]
    missing = [rule for rule in (*EFFECTS, *EXCLUSIONS) if rule not in tested]
    assert all(rule.subject is UNTOLD_LENGTHS for rule in missing)
    with pytest.raises(UserError, match=r"num_chunks=2 works only with interleaved .*zb-auto on a loop or in a wave"):
        ZeroBubbleConfig("zb-auto", num_chunks=2)
    ZeroBubbleConfig("zb-auto", placement="loop", num_chunks=2)


EXCLUDED_BY_LENGTHS: dict[str, tuple[str, Any]] = {
    "sequence slices": ("num_slices", 2),
    "vocabulary parallelism": ("vocabulary", "2"),
    "offloading that is planned by times": ("offload", "auto"),
    "recorded iterations": ("trace", "x"),
    "pairs": ("overlap_experts", "dualpipe-v"),
}
"""The field and a value that choose it, for what excludes microbatches of different lengths."""


@pytest.mark.parametrize(
    "rule", [rule for rule in EXCLUSIONS if rule.subject in (LENGTHS, UNTOLD_LENGTHS)], ids=lambda rule: rule.what
)
@pytest.mark.parametrize("by", ["variable_seq_lengths", "shapes"])
def test_what_microbatches_of_different_lengths_exclude(rule: Rule, by: str) -> None:
    name, value = EXCLUDED_BY_LENGTHS[rule.what]
    lengths = f"microbatches of different lengths and {rule.what}"
    said = f"{lengths} exclude each other, because {rule.why}; got {by} and {name}={value}; {rule.remedy}"
    with pytest.raises(UserError) as caught:
        refuse_excluded({name: value, by: True})
    assert str(caught.value) == said
    check_options(SimpleNamespace(variable_seq_lengths=True), choices={"schedule": "zb-h1"})
    with pytest.raises(UserError, match=lengths):
        check_options(SimpleNamespace(variable_seq_lengths=True), choices={name: value})


def refusal(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What a command says that is refused before it searches."""

    def search(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was searched")

    for module, name in ((plans, "zb_auto"), (plans, "sliced_auto"), (plans, "fit"), (vocabulary, "auto")):
        monkeypatch.setattr(module, name, search)
    assert main(command.split()) == 2
    return capsys.readouterr().err.strip()


@pytest.mark.parametrize(("rule", "command"), named(plans_of_exclusions()))
def test_exclusions_are_asked_before_any_search(
    rule: Rule, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = refusal(f"{command} {TIMES}", capsys, monkeypatch)
    words = f"{rule.subject.words} and {rule.what} exclude each other, because {rule.why}; got "
    assert said.startswith(f"zero-bubble {command.split(maxsplit=1)[0]}: {words}") and said.endswith(rule.remedy)


@pytest.mark.parametrize("more", ["", "--offload auto --host-ms 1"])
@pytest.mark.parametrize("times", ["--vocabulary auto", "--output-ms 0.2 --output-wgrad-ms 0.2"])
def test_slices_with_the_vocabulary_are_refused_before_the_search(
    more: str, times: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the search ran first; with offloading, the plan then was without vocabulary parallelism."""
    said = refusal(f"plan --schedule zb-auto {TIMES} --num-slices 2 {times} {more}", capsys, monkeypatch)
    assert "sequence slices and vocabulary parallelism exclude each other" in said


@pytest.mark.parametrize(
    "verb", ["plan --schedule zb-auto --num-slices 2", "plan --schedule seq-zb-h1", "compare --num-slices 2"]
)
def test_times_of_the_vocabulary_in_a_costs_file_exclude_slices(
    verb: str, tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "costs.json"
    file.write_text(
        '{"forward_ms": 1, "backward_ms": 1, "wgrad_ms": 1, "comm_ms": 0, "output_ms": 0.2, "output_wgrad_ms": 0.2}'
    )
    said = refusal(f"{verb} --num-ranks 2 --num-microbatches 4 --costs {file}", capsys, monkeypatch)
    assert "and vocabulary parallelism exclude each other" in said and "--vocabulary auto; leave" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--zero-bubble-schedule zb-auto --zero-bubble-attention-share 0 --zero-bubble-vocabulary-parallel 1",
            "got --zero-bubble-attention-share 0.0 and --zero-bubble-vocabulary-parallel 1; leave",
        ),
        ("--zero-bubble-schedule= --zero-bubble-exact", "--zero-bubble-exact works only with a zero-bubble schedule"),
    ],
)
def test_zero_chooses_something_and_an_empty_text_nothing(words: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_flags(Job(parse_ours(words.split())[0]))


@pytest.mark.parametrize("command", ["plan --schedule zero-pp --shard-weights", "compare --shard-weights"])
def test_times_of_zero_choose_vocabulary_parallelism(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = refusal(f"{command} {TIMES} --output-ms 0 --output-wgrad-ms 0", capsys, monkeypatch)
    assert "sharded units and vocabulary parallelism exclude each other" in said


def test_a_job_and_a_plan_refuse_in_the_same_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = refusal(f"plan --schedule zero-pp {TIMES} --shard-weights --vocabulary 2", capsys, monkeypatch)
    with pytest.raises(UserError) as caught:
        ZeroBubbleConfig("zero-pp", shard_weights=True, vocabulary=2)
    words = str(caught.value).replace("got shard_weights and vocabulary=2", "got --shard-weights and --vocabulary 2")
    assert said == f"zero-bubble plan: {words}"


def test_exclusions_are_symmetric() -> None:
    one, other = Choice("one", chosen("a")), Choice("other", chosen("b"))
    rule = Rule(one, other, False, "why")
    for choices, refused in (({}, False), ({"a": 1}, False), ({"b": 1}, False), ({"a": 1, "b": "x"}, True)):
        assert bool(rule.sentence(choices)) is refused
    assert rule.sentence({"a": 1, "b": "x"}) == (
        "one and other exclude each other, because why; got a=1 and b=x; leave one of them out"
    )


@pytest.mark.parametrize("how", [{"num_slices": 4}, {"vocabulary": True}], ids=str)
@pytest.mark.parametrize("name", ["hybrid_layer_pattern", "hybrid_override_pattern", "is_hybrid_model"])
def test_hybrid_models_are_refused_however_a_job_names_them(name: str, how: dict[str, Any]) -> None:
    """Before the start: slices and vocabulary parallelism would find another model only in the first iteration."""
    with pytest.raises(UserError, match=name.replace("_", "[-_]")):
        check_options(SimpleNamespace(**{name: MEGATRONS_VALUES.get(name, True)}), **how)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--zero-bubble-host-memory 3GiB", "memory it limits; leave it out, or give --zero-bubble-offload all"),
        ("--zero-bubble-whole-stages 2", "leave it out, or give --zero-bubble-shard-weights"),
        ("--zero-bubble-slice-ends 5,6", "--zero-bubble-slices 5,6 works only .* --zero-bubble-schedule seq-zb-h1"),
        ("--zero-bubble-exact --zero-bubble-fuse-wgrad", "got --zero-bubble-exact and --zero-bubble-fuse-wgrad; "),
        (
            "--zero-bubble-vocabulary-parallel 2 --zero-bubble-shard-weights",
            "shard-weights and --zero-bubble-vocabulary-parallel 2",
        ),
        ("--zero-bubble-schedule-file x.json", "got --zero-bubble-schedule zb-h1 and --zero-bubble-schedule x.js"),
    ],
)
def test_a_job_is_refused_with_the_names_of_its_flags(words: str, said: str) -> None:
    """Not with those of fields, which only a loop of one's own has."""

    def checked() -> None:
        options, _ = parse_ours(["--zero-bubble-schedule", "zb-h1", *words.split()])
        adopt(options)
        check_flags(Job(options))

    with pytest.raises(UserError, match=said):
        checked()


def test_a_loop_is_refused_with_the_names_of_fields() -> None:
    with pytest.raises(UserError, match="host_memory=3GiB works only with offloading.*, or give offload=all"):
        ZeroBubbleConfig("zb-h1", host_memory="3GiB")
