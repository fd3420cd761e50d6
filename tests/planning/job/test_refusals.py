"""Every row of the tables of refusals refuses what it says, in its own words, and nothing else.

``tests/cli/test_megatron_job.py`` compares the same jobs in a dry run and in a run of a Megatron-LM job.
"""

from __future__ import annotations

import re
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.plan import PlanFile
from megatron.zero_bubble.core.ir.vocabulary import Divided
from megatron.zero_bubble.core.schedules import build
from megatron.zero_bubble.planning import cuts, plans, vocabulary
from megatron.zero_bubble.planning.codecs import flag_of
from megatron.zero_bubble.planning.decision import in_fields
from megatron.zero_bubble.planning.decisions import DECISIONS
from megatron.zero_bubble.planning.exclusions import (
    EXCLUSIONS,
    LENGTHS,
    OPTIONS,
    SHARDS,
    UNTOLD_LENGTHS,
    refuse_excluded,
)
from megatron.zero_bubble.planning.job import planned
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig
from megatron.zero_bubble.planning.job.effects import EFFECTS, Effect, Job
from megatron.zero_bubble.planning.job.flags import as_given, given_in, parse_ours
from megatron.zero_bubble.planning.job.options import check_options, check_options_of
from megatron.zero_bubble.planning.job.rules import check_job
from megatron.zero_bubble.planning.observations import Observations
from megatron.zero_bubble.planning.rule import Choice, Exclusion, OptionRule
from megatron.zero_bubble.planning.run_options import Balance, RunOptions
from megatron.zero_bubble.planning.setup import Cuts, Named, Offload, Setup, Validated
from megatron.zero_bubble.planning.values import ALGORITHMS
from tests.helpers.refusals import (
    MEGATRONS_VALUES,
    jobs_of_effects,
    jobs_of_exclusions,
    plans_of_exclusions,
    unsupported,
)

TIMES = "--num-ranks 3 --num-microbatches 3 --forward-ms 1 --backward-ms 1 --wgrad-ms 1"
UNDER = {
    "post-validation": RunOptions(Setup(step=Validated())),
    "sequence slices": RunOptions(Setup(cuts=Cuts(4, "even"))),
    "vocabulary parallelism": RunOptions(Setup(vocabulary=Divided(1))),
    "balanced microbatches": RunOptions(balance=Balance()),
    "microbatches of different lengths": RunOptions(lengths=("shapes", True)),
    "pairs": RunOptions(Setup(pairs=True)),
}
"""What chooses the subject of a rule."""
PLAN = PlanFile(build("zb-h1", num_ranks=2, num_microbatches=2))
ON_A_V = "stages on a V or in a wave"


def named(rows: list[tuple[Exclusion, str]]) -> list[Any]:
    return [pytest.param(*row, id=row[1]) for row in rows]


@pytest.mark.parametrize("rule", OPTIONS, ids=lambda rule: f"{rule.choice.words}: {rule.option}")
def test_options_of_megatron(rule: OptionRule) -> None:
    words = rule.choice.words

    def ask(value: object, run: RunOptions, on_a_v: bool = False) -> None:
        values = SimpleNamespace(**{rule.option: value})
        if rule.choice is SHARDS:
            check_options_of(SHARDS, values)
        else:
            check_options(values, run, megatrons_own=not on_a_v)

    under = UNDER.get(words, RunOptions()), words == ON_A_V
    ask(rule.value, *under)
    ask(None, *under)
    other = unsupported(rule)
    with pytest.raises(UserError) as caught:
        ask(other, *under)
    assert str(caught.value).startswith(f"{rule.choice.subject} need {rule.option}={rule.value!r}, because ")
    assert str(caught.value).endswith(f"; got {other!r}; {rule.remedy}")
    of_others = (each for each in OPTIONS if each.choice.words not in (*UNDER, ON_A_V))
    if (words in UNDER or words == ON_A_V) and all(each.option != rule.option for each in of_others):
        ask(other, RunOptions())


@pytest.mark.parametrize(
    ("rule", "words", "under_launcher"),
    [
        pytest.param(rule, words, under, id=f"{words} {'under the launcher' if under else 'in our loop'}")
        for under in (False, True)
        for rule, words in (*jobs_of_effects(under), *jobs_of_exclusions(under))
    ],
)
def test_flags_of_a_job(
    rule: Effect | Exclusion, words: str, under_launcher: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planned, "read_plan_file", lambda _: PLAN)

    def checked() -> None:
        run, _ = parse_ours(words.split())
        check_job(Job(run, under_launcher, shows_stock_passes=False, train_iters=10))

    with pytest.raises(UserError) as caught:
        checked()
    said = str(caught.value)
    if isinstance(rule, Exclusion):
        assert said.startswith(f"{rule.one.words} and {rule.other.words} exclude each other, because {rule.why}; got ")
    else:
        flags = {row.flag: f"--zero-bubble-{row.flag}" for row in DECISIONS}
        merged = {flags[row.flag]: flag_of(row.name) for row in DECISIONS if row.within}
        assert f" works only with {rule.needs.words}{rule.why.partition('{')[0]}" in said
        assert said.split(maxsplit=1)[0] in {merged.get(word, word) for word in words.split()}
    assert said.endswith(f"; {rule.remedy(as_given)}")


def configurations() -> list[Any]:
    """The fields of a configuration in the place of the flags, where a rule can be broken by these alone."""
    names = {field.name for field in fields(ZeroBubbleConfig)}
    found = []
    for rule, words in (*jobs_of_effects(False), *jobs_of_exclusions(False)):
        given, _ = given_in(words.split())
        # Of a configuration, fuse_wgrad=True is the default, which cannot contradict anything.
        if set(given) <= names - {"fuse_wgrad"} and "schedule" in given:
            given["vocabulary"] = ALGORITHMS.get(given.get("vocabulary"))
            found.append(pytest.param(rule, given, id=words))
    return found


@pytest.mark.parametrize(("rule", "own"), configurations())
def test_fields_of_a_configuration(
    rule: Effect | Exclusion, own: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planned, "read_plan_file", lambda _: PLAN)
    with pytest.raises(UserError, match=re.escape(f"; {rule.remedy(in_fields)}")) as caught:
        _ = ZeroBubbleConfig(**own).setup  # a file is read then
    assert rule.why.partition("{")[0] in str(caught.value) and "--zero-bubble" not in str(caught.value).split(";")[0]


def test_every_row_has_a_case() -> None:
    assert len(configurations()) >= 20
    of_jobs = [*jobs_of_effects(False), *jobs_of_effects(True), *jobs_of_exclusions(False), *plans_of_exclusions()]
    tested = [rule for rule, _ in of_jobs]
    assert all(rule in tested for rule in EFFECTS)
    assert all(rule.one is UNTOLD_LENGTHS for rule in EXCLUSIONS if rule not in tested)
    with pytest.raises(UserError, match=r"num_chunks=2 works only with interleaved .*zb-auto on a loop or in a wave"):
        ZeroBubbleConfig("zb-auto", num_chunks=2)
    ZeroBubbleConfig("zb-auto", placement="loop", num_chunks=2)


@pytest.mark.parametrize("name", ["mtp_use_repeated_layer", "mtp_hsm"])
def test_predictions_that_see_more_than_a_slice_are_refused(name: str) -> None:
    """Before the start: the gradients would be wrong in silence."""
    with pytest.raises(UserError, match=name.replace("_", "[-_]")):
        check_options(SimpleNamespace(**{name: True}), UNDER["sequence slices"])


def test_hyper_connections_are_refused_with_predictions() -> None:
    job = {"enable_hyper_connections": True, "mtp_num_layers": 1}
    with pytest.raises(
        UserError, match="need mtp_num_layers to be None with hyper-connections, because Megatron's own"
    ):
        check_options(SimpleNamespace(**job), UNDER["sequence slices"])
    check_options(SimpleNamespace(**{**job, "mtp_num_layers": None}), UNDER["sequence slices"])


def test_a_loss_that_computes_logits_is_refused_with_a_divided_vocabulary() -> None:
    job = {"cross_entropy_fusion_impl": "linear", "cross_entropy_loss_fusion": True}
    with pytest.raises(
        UserError, match="need cross_entropy_fusion_impl to be native or te.*got 'linear'; give --cross"
    ):
        check_options(SimpleNamespace(**job), UNDER["vocabulary parallelism"])
    check_options(SimpleNamespace(**{**job, "cross_entropy_loss_fusion": False}), UNDER["vocabulary parallelism"])


EXCLUDED_BY_LENGTHS = {
    "sequence slices": ("num_slices=2", RunOptions(Setup(Named("zb-h1"), cuts=Cuts(2, "even")))),
    "vocabulary parallelism": ("vocabulary=2", RunOptions(Setup(Named("zb-h1"), vocabulary=Divided(2)))),
    "offloading that is planned by times": ("offload=auto", RunOptions(Setup(Named("zb-h1"), offload=Offload("auto")))),
    "recorded costs": ("record_costs=x", RunOptions(Setup(Named("zb-h1")), Observations(record_costs="x"))),
    "pairs": ("overlap_experts", RunOptions(Setup(Named("dualpipe-v"), pairs=True))),
}
"""What excludes microbatches of different lengths, as a field and as options."""


@pytest.mark.parametrize(
    "rule", [rule for rule in EXCLUSIONS if rule.one in (LENGTHS, UNTOLD_LENGTHS)], ids=lambda rule: rule.other.words
)
@pytest.mark.parametrize("by", ["variable_seq_lengths", "shapes"])
def test_what_microbatches_of_different_lengths_exclude(rule: Exclusion, by: str) -> None:
    given, run = EXCLUDED_BY_LENGTHS[rule.other.words]
    lengths = f"microbatches of different lengths and {rule.other.words}"
    said = f"{lengths} exclude each other, because {rule.why}; got {by} and {given}; {rule.remedy()}"
    with pytest.raises(UserError) as caught:
        refuse_excluded(replace(run, lengths=(by, True)))
    assert str(caught.value) == said
    varying = SimpleNamespace(variable_seq_lengths=True, bf16=True)
    check_options(varying, RunOptions(Setup(Named("zb-h1")), Observations(trace="x")))
    with pytest.raises(UserError, match=lengths):
        check_options(varying, run)


def refusal(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What a command says that is refused before it searches."""

    def search(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was searched")

    for module, name in ((plans, "zb_auto"), (cuts, "sliced_auto"), (plans, "fit"), (vocabulary, "auto")):
        monkeypatch.setattr(module, name, search)
    assert main(command.split()) == 2
    return capsys.readouterr().err.strip()


@pytest.mark.parametrize(("rule", "command"), named(plans_of_exclusions()))
def test_exclusions_are_asked_before_any_search(
    rule: Exclusion, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = refusal(f"{command} {TIMES}", capsys, monkeypatch)
    words = f"{rule.one.words} and {rule.other.words} exclude each other, because {rule.why}; got "
    assert said.startswith(f"zero-bubble {command.split(maxsplit=1)[0]}: {words}") and said.endswith(rule.remedy())


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
        parse_ours(words.split())


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
    def choice(name: str) -> Choice:
        return Choice(name, lambda run: [(name, 1)] if name in run.setup.name else [])

    for row in (Exclusion(choice("a"), choice("b"), "why"), Exclusion(choice("b"), choice("a"), "why")):
        for name, refused in (("c", False), ("a", False), ("b", False), ("ab", True)):
            assert bool(row.sentence(RunOptions(Setup(Named(name))))) is refused
    assert row.sentence(RunOptions(Setup(Named("ab")))) == (
        "b and a exclude each other, because why; got b=1 and a=1; leave one of them out"
    )


@pytest.mark.parametrize("how", ["pairs"])
@pytest.mark.parametrize("name", ["hybrid_layer_pattern", "hybrid_override_pattern", "is_hybrid_model"])
def test_hybrid_models_are_refused_however_a_job_names_them(name: str, how: str) -> None:
    """Before the start: pairs would find another model in the first iteration."""
    with pytest.raises(UserError, match=name.replace("_", "[-_]")):
        check_options(SimpleNamespace(**{name: MEGATRONS_VALUES.get(name, True)}), UNDER[how])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--zero-bubble-host-memory 3GiB", "memory it limits; leave it out, or give --zero-bubble-offload all"),
        ("--zero-bubble-whole-stages 2", "leave it out, or give --zero-bubble-shard-weights"),
        ("--zero-bubble-slice-ends 5,6", "--zero-bubble-slices 5,6 works only .* --zero-bubble-schedule seq-zb-h1"),
        (
            "--zero-bubble-vocabulary-parallel 2 --zero-bubble-shard-weights",
            "shard-weights and --zero-bubble-vocabulary-parallel 2",
        ),
    ],
)
def test_a_job_is_refused_with_the_names_of_its_flags(words: str, said: str) -> None:
    """Not with those of fields, which only a loop of one's own has."""

    with pytest.raises(UserError, match=said):
        parse_ours(["--zero-bubble-schedule", "zb-h1", *words.split()])


def test_a_loop_is_refused_with_the_names_of_fields() -> None:
    with pytest.raises(UserError, match="host_memory=3GiB works only with offloading.*, or give offload=all"):
        ZeroBubbleConfig("zb-h1", host_memory="3GiB")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "needs whole layers that are recomputed; got recompute_granularity=None"),
        ({"recompute_granularity": "selective"}, "got recompute_granularity='selective'"),
        ({"recompute_granularity": "full", "fp8": "e4m3"}, "TransformerEngine's own checkpoint runs in B"),
    ],
)
def test_early_recomputation_needs_whole_layers(options: dict[str, str], words: str) -> None:
    early = RunOptions(Setup(Named("zb-h1"), early_recompute=True))
    check_options(SimpleNamespace(recompute_granularity="full"), early)
    with pytest.raises(UserError, match=words):
        check_options(SimpleNamespace(**options), early)
