"""Tests of the parser of Megatron's layouts and patterns: it rejects what megatron-core rejects, in a sentence."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.formats.layout_string import check_layout, layers_of, predictions_of, read_hybrid, read_layout

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
