"""Tests of the parser of Megatron's layouts and patterns: it rejects what megatron-core rejects, in a sentence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.layout_string import (
    check_layout,
    layers_of,
    predictions_of,
    read_hybrid,
    read_layout,
    with_stages,
    write_layout,
)

WRONG = [
    ("tt|tt|tt|tt", 0, "the first letter of --pipeline-model-parallel-layout must be E, the embedding"),
    ("Ett|tt|tt|tt", 0, "the last letter of --pipeline-model-parallel-layout must be L, the output layer"),
    ("Ett|tt|Ett|ttL", 0, "must be E, the embedding, and there must be no other; got 'Ett|tt|Ett|ttL'; write E once"),
    ("Etx|tt|tt|tttL", 0, "has the invalid letter 'x' in 'Etx|tt|tt|tttL'; use only E (embedding), t ("),
    ("Ett|tt|ttttL", 0, "has 3 stages and 8 layers, but the job has 4 stages and 8 layers"),
    ("Ett|tt|tt|tL", 0, "has 4 stages and 7 layers, but the job has 4 stages and 8 layers"),
    (
        "Et*3|t*3|t|tmL",
        0,
        "one m per layer of multi-token prediction, got 1 in 'Et*3|t*3|t|tmL' and --mtp-num-layers 0",
    ),
    ("Ett|tt|tt|ttL", 1, "got 0 in 'Ett|tt|tt|ttL' and --mtp-num-layers 1; change either"),
    ("Ett|tt|tt|mttL", 1, "each t of --pipeline-model-parallel-layout must precede every m"),
    ("Ett|tt|ttm|ttL", 1, "each t of --pipeline-model-parallel-layout must precede every m"),
    ("Ett|tt|ttttm|mL", 2, "must be on one stage"),
]
RIGHT = [("Et*3|(tt|)*2,tL", 0), ("Ett|tt|tt|ttmmL", 2), ("E|t*4|t*4m|L", 1)]


def megatrons_answer(text: str, predictions: int) -> str:
    """What megatron-core objects to in a layout of eight layers on four ranks; "" if nothing."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    try:
        layout = PipelineParallelLayerLayout(text, 4)
        assert layout.virtual_pipeline_model_parallel_size == 1
        layout.validate_layer_layout(8, predictions or None)
    except AssertionError as error:
        return str(error) or "no words"
    return ""


@pytest.mark.parametrize(("text", "predictions", "words"), WRONG)
def test_what_megatron_rejects_gets_a_sentence(text: str, predictions: int, words: str) -> None:
    assert megatrons_answer(text, predictions)
    with pytest.raises(UserError) as caught:
        check_layout(text, 4, 8, 4, predictions)
    assert words in str(caught.value)


@pytest.mark.parametrize(("text", "predictions"), RIGHT)
def test_what_megatron_accepts_is_read(text: str, predictions: int) -> None:
    assert megatrons_answer(text, predictions) == ""
    check_layout(text, 4, 8, 4, predictions)
    assert sum(layers_of(text, 4, 8)) == 8 and sum(predictions_of(text)) == predictions


def test_multi_token_prediction_is_on_the_last_stage_of_its_rank() -> None:
    check_layout("Ettt|tttt|tm|L", 2, 8, 4, 1)
    with pytest.raises(UserError, match="must be the last stage of its rank"):
        check_layout("Etttt|ttttm||L", 2, 8, 4, 1)
    with pytest.raises(UserError, match="which only Megatron-LM jobs have"):
        check_layout("Ett|tt|tt|ttmL", 4, 8, 4, None)


def test_pattern_of_a_hybrid_model() -> None:
    assert read_hybrid("M*M-|M-ME") == (("M*M-", "M-ME"), ())
    assert read_hybrid("M*M-/MM/MM") == (("M*M-",), ("MM", "MM"))
    with pytest.raises(UserError, match=r"--hybrid-layer-pattern has the invalid letter 't' in 'M\*t'; use only M"):
        read_hybrid("M*t")


def test_repetitions_are_written_out() -> None:
    assert read_layout("Et*2|(t|)*2L") == ("Ett", "t", "t", "L")


@pytest.mark.parametrize("text", ["Et*99999999999|ttL", "E(t*9999)*9999|ttL", f"Et*{'9' * 5000}|ttL", "E(tt|)*9999L"])
def test_repetitions_are_limited_before_they_are_made(text: str) -> None:
    with pytest.raises(UserError, match=r"at most 10,000 letters and \|, repetitions included; got more in 'E"):
        read_layout(text)


@pytest.mark.parametrize("text", ["Et*|tt|tt|ttL", "E(tt|tt|tt|ttL", "Ett|tt)|ttL", "E(tt|)tL", "E()*2L"])
def test_an_incomplete_repetition_has_its_own_sentence(text: str) -> None:
    with pytest.raises(
        UserError, match=r"needs a number after its \*, and each \( needs its \) with a \* and a number"
    ):
        read_layout(text)


def test_the_allowed_letters_include_repetitions() -> None:
    with pytest.raises(UserError, match=r"\| between stages; \*N behind a letter or \( \) repeats it"):
        read_layout("Ex|tL")


@given(st.lists(st.text("Etm L", max_size=9).map(lambda letters: letters.replace(" ", "")), min_size=1, max_size=9))
def test_what_is_written_is_read(stages: list[str]) -> None:
    assert read_layout(write_layout(stages)) == tuple(stages)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[str], int]:
    """Stages of a valid layout with several stages per rank, and the number of ranks."""
    ranks, chunks = draw(st.integers(2, 5)), draw(st.integers(1, 4))
    counts = draw(st.lists(st.integers(0, 4), min_size=ranks * chunks, max_size=ranks * chunks))
    stages = ["t" * count for count in counts]
    stages[0] = "E" + stages[0]
    stages[-1] += "L"
    if predictions := draw(st.integers(0, 2)):
        where = draw(st.integers(len(stages) - ranks, len(stages) - 1))
        if not any("t" in stage for stage in stages[where + 1 :]):
            before, end, after = stages[where].partition("L")
            stages[where] = before + "m" * predictions + end + after
    return stages, ranks


@given(layouts(), st.integers(1, 4))
def test_another_number_of_stages_keeps_all_layers_in_order(layout: tuple[list[str], int], chunks: int) -> None:
    stages, ranks = layout
    letters = "".join(stages)
    found = with_stages(write_layout(stages), ranks * chunks, ranks)
    assert "".join(read_layout(found)) == letters
    check_layout(found, ranks, letters.count("t"), ranks * chunks, letters.count("m"))
    if ranks * chunks == len(stages) and all(stages):
        assert read_layout(found) == tuple(stages)


RECUT = [
    ("Et*3|(tt|)*29m|L", 16, 16, "Et*5|(t*4|)*14mL"),  # DeepSeek-V3: 61 layers on 16 ranks
    ("Et*5|(t*4|)*14mL", 32, 16, "Et*3|(tt|)*29m|L"),
    ("Et|t|t|t|t|t|tt|mL", 4, 4, "Ett|(tt|)*2ttmL"),
    ("Ett|ttm|L", 6, 3, "Et|(t|)*3m|L"),
    ("E(tt|)*23L", 16, 8, "Et*3|(t*3|)*14tL"),
]


@pytest.mark.parametrize(("text", "num_stages", "num_ranks", "wanted"), RECUT)
def test_a_layout_is_recut(text: str, num_stages: int, num_ranks: int, wanted: str) -> None:
    assert with_stages(text, num_stages, num_ranks) == wanted
