"""Megatron's strings for what each stage holds, which the run, the dry run and the planner read with this one parser.

``--pipeline-model-parallel-layout`` has the letters E (embedding), t (transformer layer), m (multi-token prediction)
and L (output layer with the loss); ``--hybrid-layer-pattern`` has one letter per layer, by its type. The rules are
those of ``megatron.core.transformer.pipeline_parallel_layer_layout``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir.sizes import MOST_LAYERS

FLAG = "--pipeline-model-parallel-layout"
_LETTERS = {
    "E": "embedding",
    "t": "transformer layer",
    "m": "multi-token prediction",
    "L": "output layer with the loss",
}
_REPEATED = (r"\(([^)]+)\)\*([0-9]+)", r"(.)\*([0-9]+)")
HYBRID_KINDS = {
    "M": "Mamba",
    "G": "gated delta net",
    "*": "attention",
    "D": "sparse attention",
    "+": "latent attention",
    "-": "MLP",
    "E": "experts",
}
"""The kinds of layers of hybrid models, by the letters of ``--hybrid-layer-pattern``."""
_ENDS = (("E", "embedding", 0, "first", "in front"), ("L", "output layer with the loss", -1, "last", "at the end"))


def read_layout(text: str) -> tuple[str, ...]:
    """Return the letters of every stage, without repetitions: ``Et*2|(t|)*2L`` is ``Ett``, ``t``, ``t``, ``L``.

    Raises:
        UserError: a letter that has no meaning, an incomplete repetition, or too many letters.
    """
    unrolled = text.replace(",", "")
    for repeated in _REPEATED:
        _check_length(text, unrolled, repeated)
        unrolled = re.sub(repeated, lambda match: match[1] * _count(match[2]), unrolled)
    if set(unrolled) & set("*()"):
        raise UserError(
            f"a repetition in {FLAG} needs a number after its *, and each ( needs its ) with a * and a number; got "
            f"{text!r:.80}; write t*2 or (t|)*2"
        )
    stages = tuple(unrolled.split("|"))
    _check_letters(FLAG, text, stages, _LETTERS, "; *N behind a letter or ( ) repeats it")
    return stages


def _check_length(text: str, unrolled: str, repeated: str) -> None:
    """Check the length that repetitions give before they are made."""
    matches = list(re.finditer(repeated, unrolled))
    length = len(unrolled) + sum(len(match[1]) * _count(match[2]) - len(match[0]) for match in matches)
    if length > MOST_LAYERS or any(_count(match[2]) > MOST_LAYERS for match in matches):
        raise UserError(
            f"{FLAG} must have at most {MOST_LAYERS:,} letters and |, repetitions included; got more in {text!r:.80}; "
            "give smaller numbers"
        )


def _count(digits: str) -> int:
    """Convert a number; one that is above the limit anyway may have more digits than Python converts."""
    digits = digits.lstrip("0") or "0"
    return int(digits) if len(digits) <= len(str(MOST_LAYERS)) else MOST_LAYERS + 1


def check_layout(text: str, num_ranks: int, num_layers: int, num_stages: int, num_predictions: int | None) -> None:
    """Reject a layout that megatron-core would reject, or that is for another job.

    Args:
        num_predictions: layers of multi-token prediction (``--mtp-num-layers``), 0 for none; None in a program that
            does not have them.

    Raises:
        UserError: the rule, the values and the remedy.
    """
    stages = read_layout(text)
    letters = "".join(stages)
    for letter, what, end, where, place in _ENDS:
        if letters.count(letter) != 1 or letters[end] != letter:
            raise UserError(
                f"the {where} letter of {FLAG} must be {letter}, the {what}, and there must be no other; got {text!r}; "
                f"write {letter} once, {place}"
            )
    layers_of(text, num_stages, num_layers)
    _check_predictions(text, stages, num_ranks, num_predictions)


def _check_predictions(text: str, stages: Sequence[str], num_ranks: int, wanted: int | None) -> None:
    found = [stage.count("m") for stage in stages]
    if wanted is None and any(found):
        raise UserError(
            f"m in {FLAG} is multi-token prediction, which only Megatron-LM jobs have; got {text!r}; remove m, or run "
            "Megatron-LM's script"
        )
    if sum(found) != (wanted or 0):
        raise UserError(
            f"{FLAG} must have one m per layer of multi-token prediction, got {sum(found)} in {text!r} and "
            f"--mtp-num-layers {wanted or 0}; change either"
        )
    if any(found) and (max(found) != sum(found) or any(found[:-num_ranks])):
        raise UserError(
            f"all m of {FLAG} must be on one stage, and that must be the last stage of its rank; got {text!r}; move "
            "them together, onto one of the last stages"
        )
    if any(found) and "t" in "".join(stages).partition("m")[2]:
        raise UserError(f"each t of {FLAG} must precede every m; got {text!r}; move m behind the last t")


def layout_layers(text: str) -> tuple[int, ...]:
    """Return the number of transformer layers on every stage of a layout."""
    return tuple(stage.count("t") for stage in read_layout(text))


def layers_of(text: str, num_stages: int, num_layers: int) -> tuple[int, ...]:
    """Return ``layout_layers``, checked.

    Raises:
        UserError: the number of stages or layers differs from the job's, or a letter has no meaning.
    """
    counts = layout_layers(text)
    if (len(counts), sum(counts)) != (num_stages, num_layers):
        raise UserError(
            f"{FLAG} has {len(counts)} stages and {sum(counts)} layers, but the job has {num_stages} stages and "
            f"{num_layers} layers; change the layout or the job"
        )
    return counts


def predictions_of(text: str) -> tuple[int, ...]:
    """Return the number of layers of multi-token prediction on every stage of a layout."""
    return tuple(stage.count("m") for stage in read_layout(text))


def write_layout(stages: Sequence[str]) -> str:
    """Write the letters of every stage with repetitions: ``Et``, ``ttt``, ``ttt``, ``L`` is ``Et|(t*3|)*2L``."""
    last = len(stages) - 1
    texts = [_run_lengths(letters) + ("" if stage == last else "|") for stage, letters in enumerate(stages)]
    runs = ((text, len(list(same))) for text, same in groupby(texts))
    return "".join(text * count if count == 1 or count * len(text) < 6 else f"({text})*{count}" for text, count in runs)


def _run_lengths(letters: str) -> str:
    runs = ((letter, len(list(same))) for letter, same in groupby(letters))
    return "".join(letter * count if count < 3 else f"{letter}*{count}" for letter, count in runs)


def with_stages(text: str, num_stages: int, num_ranks: int) -> str:
    """Return a layout with all of a layout's layers, in the same order, on another number of stages.

    Stages are merged or cut into equal parts where the numbers of stages divide each other. Otherwise, and where a
    stage would be empty or multi-token prediction not on the last stage of its rank, all layers are divided evenly.

    Args:
        num_stages: a multiple of ``num_ranks``.

    Raises:
        UserError: as ``read_layout``.
    """
    stages = read_layout(text)
    merged, parts = len(stages) // num_stages, num_stages // len(stages)
    if merged * num_stages == len(stages):
        found = ["".join(stages[merged * stage : merged * (stage + 1)]) for stage in range(num_stages)]
    elif parts * len(stages) == num_stages:
        found = [part for stage in stages for part in _cut(stage, parts)]
    else:
        found = []
    if not all(found) or not found or "m" in "".join(found[:-num_ranks]):
        found = _cut("".join(stages), num_stages)
    return write_layout(found)


def _cut(letters: str, parts: int) -> list[str]:
    """Cut consecutive letters into parts with nearly equally many; what follows the layers is the last part or two."""
    if parts == 1:
        return [letters]
    first, layers, tail = letters[: letters.count("E")], letters.count("t"), letters.lstrip("Et")
    ends = [tail[:-1], tail[-1:]] if layers < parts - 1 and "m" in tail[:-1] else [tail]
    before = parts - len(ends)
    in_last = max(0, (layers + len(tail)) // parts - len(tail)) if len(ends) == 1 else 0
    found = ["t" * ((layers - in_last + before - 1 - part) // before) for part in range(before)]
    found += ["t" * in_last + ends[0], *ends[1:]]
    return [first + found[0], *found[1:]]


def read_hybrid(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Read a pattern of layer types such as ``M-M-|M*M-/MM``.

    Returns:
        the letters of each stage, or all of them if the pattern leaves the division to Megatron; and those of each
        layer of multi-token prediction, which follow after each ``/``.

    Raises:
        UserError: a letter that has no meaning.
    """
    layers, *predictions = text.split("/")
    stages = tuple(layers.split("|"))
    _check_letters("--hybrid-layer-pattern", text, (*stages, *predictions), HYBRID_KINDS)
    return stages, tuple(predictions)


def _check_letters(flag: str, text: str, stages: Sequence[str], known: dict[str, str], more: str = "") -> None:
    if wrong := [letter for stage in stages for letter in stage if letter not in known]:
        raise UserError(
            f"{flag} has the invalid letter {wrong[0]!r} in {text!r}; use only "
            f"{', '.join(f'{letter} ({what})' for letter, what in known.items())}, and | between stages{more}"
        )
