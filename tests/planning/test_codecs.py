"""A setup is the same value in the words of every reader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir.vocabulary import Divided
from megatron.zero_bubble.core.schedules import SCHEDULES, ZB_AUTO
from megatron.zero_bubble.planning.codecs import Medium, difference, parse, spell, speller
from megatron.zero_bubble.planning.exclusions import excluded
from megatron.zero_bubble.planning.job.flags import given_in, parse_ours
from megatron.zero_bubble.planning.job.planned import other_options
from megatron.zero_bubble.planning.run_options import Balance, RunOptions
from megatron.zero_bubble.planning.setup import (
    Cuts,
    Given,
    Messages,
    Named,
    Offload,
    Searched,
    Setup,
    Shards,
    Validated,
)
from megatron.zero_bubble.planning.values import ROWS

CASES = settings(max_examples=5 * settings().max_examples, deadline=None, database=None)
Flags = list[str]


def flag(name: str, values: st.SearchStrategy[Any] | None = None) -> st.SearchStrategy[Flags]:
    """The flag with a value, or nothing."""
    with_value = st.just([name]) if values is None else values.map(lambda value: [name, str(value)])
    return st.one_of(st.just([]), with_value)


def refined(first: st.SearchStrategy[Flags], *more: st.SearchStrategy[Flags]) -> st.SearchStrategy[Flags]:
    """A flag, with others that need it, or nothing."""
    return st.one_of(st.just([]), words(first, *more))


def words(*parts: st.SearchStrategy[Flags]) -> st.SearchStrategy[Flags]:
    return st.tuples(*parts).map(lambda found: list(chain.from_iterable(found)))


def always(name: str, values: st.SearchStrategy[Any] | None = None) -> st.SearchStrategy[Flags]:
    return st.just([name]) if values is None else values.map(lambda value: [name, str(value)])


COUNTS, LIMITS = st.integers(1, 9), st.sampled_from(("1p", "0.75p", "60GiB"))
SHARES, SIZES = st.sampled_from(("auto", "all", "37.5%", "none")), st.sampled_from(("60GiB", "1.5TiB"))
PLACEMENTS = st.sampled_from(("linear", "vee", "loop", "wave"))
FRACTIONS = st.integers(1, 99).map(lambda percent: percent / 100)
ENDS = st.sets(st.integers(1, 9999), min_size=2).map(lambda ends: ",".join(map(str, sorted(ends))))


def orders(of: Callable[[str], str], *only_jobs: st.SearchStrategy[Flags]) -> st.SearchStrategy[Flags]:
    """Schedules by name, searches and files; for jobs, a search has one more flag."""
    by_name = words(
        always(of("schedule"), st.sampled_from(list(SCHEDULES))),
        flag(of("num-chunks"), COUNTS),
        flag(of("memory-limit"), LIMITS),
    )
    searched = words(
        always(of("schedule"), st.just(ZB_AUTO)),
        flag(of("placement"), PLACEMENTS),
        flag(of("num-chunks"), COUNTS),
        flag(of("memory-limit"), LIMITS),
        *only_jobs,
    )
    return st.one_of(
        st.just([]), by_name, searched, always(of("schedule-file"), st.sampled_from(("plan.json", "a b/x.json")))
    )


def zb(name: str) -> str:
    return f"--zero-bubble-{name}"


OF_JOBS = words(
    orders(zb, flag(zb("keep-faster"))),
    flag(zb("unit-microbatches"), st.one_of(COUNTS, st.just("auto"))),
    st.one_of(
        refined(flag(zb("num-slices"), COUNTS), flag(zb("attention-share"), FRACTIONS)),
        flag(zb("slice-ends"), ENDS),
        flag(zb("slices"), st.one_of(COUNTS, ENDS)),
    ),
    refined(
        always(zb("vocabulary-parallel"), st.sampled_from(("1", "2"))),
        st.one_of(flag(zb("recompute-logits")), flag(zb("recompute"), st.sampled_from(("logits", "early,logits")))),
    ),
    st.one_of(always(zb("recompute")), flag(zb("recompute"), st.just("early"))),
    refined(always(zb("offload"), SHARES), flag(zb("host-memory"), SIZES)),
    refined(
        always(zb("shard-weights")),
        flag(zb("whole-stages"), COUNTS),
        flag(zb("shard-transport"), st.sampled_from(("collective", "on-demand"))),
    ),
    flag("--pipeline-model-parallel-layout", st.just("Et*2|t*2L")),
    flag(zb("overlap-experts")),
    refined(always(zb("post-validation")), flag(zb("rollback"), st.sampled_from(("exact", "inverse")))),
    flag(zb("post-validation"), st.sampled_from(("exact", "inverse"))),
    st.one_of(flag(zb("exact")), flag("--no-zero-bubble-fuse-wgrad"), flag(zb("fuse-wgrad"))),
    flag(zb("post-receives"), st.sampled_from(("early", "late"))),
    flag(zb("nccl-ctas"), COUNTS),
    flag(zb("nccl-collective-ctas"), COUNTS),
    flag("--seq-length", COUNTS),
)  # fmt: skip
OF_PLANS = words(
    orders("--{}".format),
    flag("--unit-microbatches", st.one_of(COUNTS, st.just("auto"))),
    flag("--num-slices", st.one_of(COUNTS, st.just("auto"))),
    flag("--slice-cuts", st.sampled_from(("even", "balanced", "0.25,0.625,1"))),
    refined(always("--vocabulary", st.sampled_from(("1", "2", "auto"))), flag("--recompute-logits")),
    refined(always("--offload", SHARES), flag("--host-memory", SIZES)),
    refined(always("--shard-weights"), flag("--whole-stages", st.one_of(COUNTS, st.just("auto")))),
    flag("--layout", st.sampled_from(("even", "auto"))),
    flag("--pairs"),
    flag("--early-recompute"),
    flag("--num-ranks", COUNTS),
)


@seed(0)
@CASES
@given(OF_JOBS)
def test_flags_of_a_job_are_one_setup_in_every_medium(arguments: Flags) -> None:
    setup = parse(arguments)
    assert parse(spell(setup)) == setup
    assert parse(spell(setup, "json"), "json") == setup
    variables = spell(setup, "env")
    without = [word for word in spell(setup) if word != "--pipeline-model-parallel-layout" and word != setup.layout]
    assert parse(variables, "env") == parse(without), "a layout is no variable"


@seed(0)
@CASES
@given(OF_PLANS)
def test_flags_of_plan_and_the_query_of_the_page_are_one_setup(arguments: Flags) -> None:
    setup = parse(arguments, "plan")
    assert parse(spell(setup, "plan"), "plan") == setup
    assert parse(spell(setup, "query"), "query") == setup


@seed(0)
@CASES
@given(OF_JOBS, OF_JOBS)
def test_a_difference_turns_one_job_into_another(one: Flags, other: Flags) -> None:
    old, new = parse(one), parse(other)
    add, leave_out = difference(old, new)
    left, skips = [], False
    for word in spell(old):
        if word.startswith("--"):
            skips = word in leave_out
        left += [] if skips else [word]
    assert parse([*left, *add]) == new
    assert difference(old, old) == ((), ())


def test_a_difference_leaves_out_retired_flags() -> None:
    old = parse([zb("schedule"), "seq1f1b-zb", zb("slice-ends"), "8,16"])
    assert difference(old, Setup(Named("zb-h1"))) == (
        (zb("schedule"), "zb-h1"),
        (zb("schedule"), zb("schedule-file"), zb("slices"), zb("num-slices"), zb("slice-ends")),
    )


def test_the_share_of_attention_is_no_cut_with_balanced_microbatches() -> None:
    """It is for the cost of samples: such a job keeps it, whatever its schedule is to be."""
    job = [zb("schedule"), "zb-h1", zb("balance-microbatches"), zb("attention-share"), "0.25"]
    old = parse(job)
    assert (
        old == parse(job[:2])
        and difference(old, Setup(Named("zb-v"))).leave_out
        == difference(parse(job[:2]), Setup(Named("zb-v"))).leave_out
    )
    run, _ = parse_ours(job)
    assert run.balance == Balance(0.25) and run.setup.cuts is None
    given, _ = given_in(job)
    assert other_options(given) == {"balance_microbatches": True, "attention_share": 0.25}
    assert other_options({"schedule": "zb-v", "attention_share": 0.25, "trace": "x"}) == {"trace": "x"}
    variables = {"ZERO_BUBBLE_SCHEDULE": "zb-h1", "ZERO_BUBBLE_BALANCE_MICROBATCHES": "1"}
    assert parse(variables | {"ZERO_BUBBLE_ATTENTION_SHARE": "0.25"}, "env") == old


def test_every_decision_has_a_place() -> None:
    sections = {
        "order": (Named, Searched, Given),
        "cuts": (Cuts,),
        "vocabulary": (Divided,),
        "offload": (Offload,),
        "shards": (Shards,),
        "step": (Validated,),
        "messages": (Messages,),
    }
    for row in ROWS:
        top, _, leaf = row.path.partition(".")
        assert hasattr(Setup(), top), row.name
        assert not leaf or any(leaf in {field.name for field in fields(kind)} for kind in sections[top]), row.name


@pytest.mark.parametrize(
    ("medium", "words", "said"),
    [
        ("job", ["--zero-bubble-recompute-logits"], "--zero-bubble-recompute logits works only with --zero-bubble-voc"),
        ("plan", ["--recompute-logits"], "--recompute-logits works only with --vocabulary; give both"),
        ("env", {"ZERO_BUBBLE_EXACT": "yes"}, r"ZERO_BUBBLE_EXACT must be 1 \(on\) or 0"),
        ("json", {"num_chunk": 2}, "a setup decides schedule, .*; got num_chunk"),
        ("job", ["--zero-bubble-num-chunks", "2"], "--zero-bubble-num-chunks 2 has no effect with no schedule"),
        ("job", ["--zero-bubble-schedule", "zb-h1", "--zero-bubble-placement", "vee"], "vee has no effect with zb-h1"),
        ("job", ["--zero-bubble-nccl-ctas", "two"], "it is one number of CTAs, or two"),
    ],
)
def test_what_no_setup_can_be_is_refused_in_the_words_of_its_reader(medium: Medium, words: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse(words, medium)


def test_cuts_of_a_plan_need_numbers_in_a_job() -> None:
    with pytest.raises(UserError, match="a job needs numbers to cut sequences by; got 4 slices, balanced"):
        spell(Setup(Named("seq-zb-h1"), cuts=Cuts(4, "balanced")))
    at_tokens = Setup(Named("seq-zb-h1"), cuts=Cuts(None, (3, 4)))
    assert spell(at_tokens, "plan") == ("--schedule", "seq-zb-h1", "--slice-cuts", "0.75,1.0")


def test_a_refusal_is_a_value_in_the_words_of_its_reader() -> None:
    assert excluded(RunOptions(Setup(Named("zb-h1"), exact=True))) is None
    run = RunOptions(Setup(Searched(), cuts=Cuts(2, "even"), vocabulary=Divided(1)))
    row = excluded(run)
    assert row is not None and row.one.words == "sequence slices"
    assert "got num_slices=2 and vocabulary=1; " in row.sentence(run)
    assert "--zero-bubble-slices 2 and --zero-bubble-vocabulary-parallel 1; " in row.sentence(run, speller("job"))
    assert "got --num-slices 2 and --vocabulary 1; " in row.sentence(run, speller("plan"))
    assert "ZERO_BUBBLE_SLICES=2 and ZERO_BUBBLE_VOCABULARY_PARALLEL=1" in row.sentence(run, speller("env"))
    assert excluded(RunOptions(Setup(Searched()))) is None
    assert excluded(RunOptions(Setup(Searched()), balance=Balance())) is not None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("schedule zb-h1 schedule-file x.json", "the schedule is given twice: {}schedule zb-h1 and {}schedule x.json"),
        ("slice-ends 8,16 num-slices 2", "the cuts of sequences are given twice: {}slices 8,16 and {}slices 2; leave"),
        ("slice-ends 8,16 attention-share 0", "are given twice: {}slices 8,16 and {}attention-share 0.0; leave one"),
        ("exact fuse-wgrad", "the rounding of weight gradients is given twice: {}exact and {}fuse-wgrad; leave one"),
    ],
)
def test_one_decision_that_is_made_twice_is_refused(words: str, said: str) -> None:
    flags = [zb(word) if word[0].islower() and not word.startswith(("zb-", "x.")) else word for word in words.split()]
    for read in (parse, parse_ours):
        with pytest.raises(UserError, match=said.replace("{}", "--zero-bubble-")):
            read(flags)
    parse([zb("exact"), "--no-zero-bubble-fuse-wgrad"])
