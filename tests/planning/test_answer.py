"""Every variant of a question is answered or reported, exclusions come before any search, and figures are made once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.zero_bubble import PassCosts, PassMemory, Placement, Schedule, build
from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.core.analysis.score import is_less
from megatron.zero_bubble.core.costs.vocabulary import VocabularyCosts
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.costs import CostsFile
from megatron.zero_bubble.core.formats.plan import PlanFile
from megatron.zero_bubble.core.ir import Slices
from megatron.zero_bubble.core.ir.vocabulary import Divided, algorithm_of
from megatron.zero_bubble.planning import choosers
from megatron.zero_bubble.planning.answer import answer
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.offer import Ask, Offer
from megatron.zero_bubble.planning.question import Question
from megatron.zero_bubble.planning.score import DroppedVariant, best
from megatron.zero_bubble.planning.setup import Given, Named, Setup
from megatron.zero_bubble.planning.vocabulary import Variant

SIZES = "--num-ranks 3 --num-microbatches 3"
FEW = "--num-ranks 2 --num-microbatches 3"
TIMES = "--forward-ms 4 --backward-ms 5 --wgrad-ms 3"
DIVIDED = "--vocabulary auto --output-ms 0.8 --output-wgrad-ms 0.6"


def figures() -> Figures:
    def on(placement: Placement) -> tuple[PassCosts, PassMemory]:
        return PassCosts.uniform(placement, 4, 5, 3), PassMemory.uniform(placement)

    return Figures(3, 3, on)


def never(*_: object, **__: object) -> Schedule:
    raise AssertionError("a search was started")


@pytest.mark.parametrize("offload", ["", "--offload auto --host-ms 3"])
@pytest.mark.parametrize("slices", ["--num-slices 2", "--num-slices auto", "--slice-cuts 0.5,1"])
@pytest.mark.parametrize("choice", ["1", "auto"])
def test_slices_and_vocabulary_exclude_each_other_before_any_search(
    offload: str, slices: str, choice: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("search", "known_schedules", "searched"):
        monkeypatch.setattr(choosers, name, never)
    divided = DIVIDED.replace("auto", choice)
    assert main(f"plan --schedule zb-auto {TIMES} {SIZES} {slices} {divided} {offload}".split()) == 2
    refused = capsys.readouterr().err
    assert "sequence slices" in refused and "vocabulary parallelism" in refused


def test_a_plan_without_the_vocabulary_that_was_asked_for_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From costs per layer, the plan was made without the vocabulary, which offloading did not say."""
    part = {"forward_ms": 2, "backward_ms": 2, "wgrad_ms": 2}
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"layers": ["dense*6"], "parts": {"dense": part, "loss": part}}))
    flags = "--num-slices 2 --vocabulary auto --offload auto --host-ms 3"
    assert main(f"plan --schedule zb-auto --costs {file} {SIZES} {flags}".split()) == 2
    assert "exclude each other" in capsys.readouterr().err


def test_one_slice_is_no_slice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"plan --schedule zb-h1 {TIMES} {SIZES} --num-slices 1 {DIVIDED}".split()) == 0
    assert "(vocabulary " in capsys.readouterr().out


def test_a_variant_that_drops_out_is_reported_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of a file's schedule cannot be divided; the whole vocabulary is answered."""
    costs = figures().giving(vocabulary=VocabularyCosts.uniform(3, 0.8, 0.6))
    file = build("seq-zb-h1", num_ranks=3, num_microbatches=3, num_slices=Slices.even(2))
    order = Given("seq-zb-h1", PlanFile(file))
    monkeypatch.setattr(choosers, "variants", lambda costs, _: (Variant(None, costs), Variant(Divided(1), costs)))
    made = answer(Question(costs, Setup(order, vocabulary=Divided("auto"))))
    assert algorithm_of(made.schedule) is None
    (dropped,) = made.dropped
    assert str(dropped).startswith("vocabulary parallelism 1 dropped out: vocabulary parallelism does not support")
    monkeypatch.undo()
    with pytest.raises(UserError, match="vocabulary parallelism does not support"):
        answer(Question(costs, Setup(order, vocabulary=Divided(1))))


def test_plan_prints_what_dropped_out(capsys: pytest.CaptureFixture[str]) -> None:
    """One microbatch has to fit before anything can move, for the search within the limit alone."""
    command = f"plan --schedule zb-auto {TIMES} {FEW} --memory-limit 0.3p --offload auto --host-ms 1".split()
    assert main(command) == 0
    line = "zb-auto within 0.6 microbatches, before offloading, dropped out: the memory limit admits no schedule"
    assert line in capsys.readouterr().out
    assert main([*command, "--format", "json"]) == 0
    (name, reason), *_ = json.loads(capsys.readouterr().out)["dropped"].items()
    assert f"{name} dropped out: {reason}".startswith(line)


def test_the_best_of_equals_is_the_first() -> None:
    values = {"a": (0.0, 2.0), "b": (0.0, 1.0), "c": (0.0, 1.0 - 1e-12), "d": (3.0, 0.5)}
    found = best(["a", DroppedVariant("x", "not for it"), "b", "c", "d"], values.__getitem__, is_less)
    assert (found.offer, found.dropped) == ("b", (DroppedVariant("x", "not for it"),))
    with pytest.raises(UserError, match="not for it"):
        best([DroppedVariant("x", "not for it"), DroppedVariant("y", "nor this")], values.__getitem__)


@pytest.mark.parametrize(
    "flags", ["", "--num-slices auto", "--vocabulary auto", "--offload auto --host-ms 3", "--layout auto"]
)
def test_figures_of_a_placement_are_made_once(flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The costs file was asked up to 49 times for two placements."""
    part = {"forward_ms": 2, "backward_ms": 2, "wgrad_ms": 2}
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"layers": ["dense*6"], "parts": {"dense": part, "loss": part}}))
    asked: Counter[Placement] = Counter()
    original = CostsFile.on

    def counted(own: CostsFile, placement: Placement) -> tuple[PassCosts, PassMemory | None]:
        asked[placement] += 1
        return original(own, placement)

    monkeypatch.setattr(CostsFile, "on", counted)
    assert main(f"plan --schedule zb-auto --costs {file} {FEW} {flags}".split()) == 0
    assert max(asked.values()) <= 2 and asked.total() <= 8, "once to see whether the file has memory"


def test_choosers_pass_on_what_they_do_not_choose() -> None:
    """A question without choices is one question at the end."""
    asked: list[Question] = []

    def make(question: Question, _: Ask) -> Iterator[Offer]:
        asked.append(question)
        yield Offer(build("zb-h1", num_ranks=3, num_microbatches=3), question.costs)

    order = choosers.shards, choosers.offload, choosers.layout, choosers.vocabulary, choosers.slices, make
    made = answer(Question(figures(), Setup(Named("zb-h1"))), order)
    assert (made.schedule.name, len(asked), made.dropped, made.certificate) == ("zb-h1", 1, (), None)
