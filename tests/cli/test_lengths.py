"""``plan --lengths``: times and picture of microbatches of different lengths, and their best order."""

from __future__ import annotations

import re

import pytest

from megatron.zero_bubble import LengthCost, build
from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.core.costs.lengths import Load
from megatron.zero_bubble.planning.ordering import Simulator

Capture = pytest.CaptureFixture[str]
TOKENS = [4096, 16384, 2048, 8192, 2048, 16000, 300, 12000]
PASSES = ["--forward-ms", "10", "--backward-ms", "10", "--wgrad-ms", "10"]


def plan(capsys: Capture, *arguments: str) -> str:
    """What the command prints."""
    assert main(["plan", "--num-ranks", "4", *PASSES, *arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def makespan_ms(text: str) -> float:
    return float(text.split("\nmakespan")[1].split(maxsplit=1)[0])


@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_times_are_those_of_the_lengths_in_either_order(capsys: Capture, name: str) -> None:
    text = plan(capsys, "--schedule", name, "--lengths", ",".join(map(str, TOKENS)))
    mean = round(sum(TOKENS) / len(TOKENS))
    simulator = Simulator(lambda count: build(name, num_ranks=4, num_microbatches=count), LengthCost(30 / mean))
    own = [Load.of([tokens]) for tokens in TOKENS]
    least, order = simulator.best(own)
    found = re.search(r"balance: makespan ([\d.]+) ms, .* less, span [\d.]+ ms; microbatches ([\d ]+)\n", text)
    assert found is not None, text
    assert makespan_ms(text) == pytest.approx(simulator.makespan(own), abs=1e-3)
    assert float(found[1]) == pytest.approx(least, abs=1e-3)
    assert found[2].split() == list(map(str, order))
    best = plan(capsys, "--schedule", name, "--lengths", ",".join(str(TOKENS[at]) for at in order))
    assert "the order that megatron.zero_bubble.balance would choose" in best
    assert makespan_ms(best) == pytest.approx(least, abs=1e-3)


def test_copies_take_as_long_as_their_microbatch_is(capsys: Capture) -> None:
    """Those of a long microbatch, too slow to hide, delay it; a plan for equal ones hides them."""
    command = "--schedule", "zb-h2", "--offload", "50%", "--host-ms"
    lengths = "--lengths", ",".join(map(str, TOKENS))
    (whole, moved), (equal, equal_moved) = (
        [makespan_ms(plan(capsys, *command, ms, *of)) for ms in ("0.01", "10")]
        for of in (lengths, ("--num-microbatches", str(len(TOKENS))))
    )
    assert moved > 1.01 * whole and equal_moved < 1.5 * equal
    assert (
        main(["plan", "--num-ranks", "4", *PASSES, *command[:2], "--offload", "auto", "--host-ms", "1", *lengths]) == 2
    )
    assert "; give --offload all" in capsys.readouterr().err


def test_attention_of_packed_samples_is_their_own(capsys: Capture) -> None:
    command = ("--schedule", "zb-h1", "--attention-share", "0.5", "--lengths")
    whole, packed = (plan(capsys, *command, f"1024,{middle},1024") for middle in ("4096", "2048+2048"))
    assert makespan_ms(packed) < 0.9 * makespan_ms(whole)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lengths", "4096,x"], "a list of numbers of tokens; got '4096,x'"),
        (["--lengths", "4096,0"], "a list of numbers of tokens"),
        (["--lengths", "4096,8192", "--num-microbatches", "3"], "got 2 for --num-microbatches 3"),
        (["--lengths", "4096,8192", "--step-ms", "5"], "--step-ms is only computed for equal microbatches"),
        (["--lengths", "4096,8192", "--num-slices", "2"], "sequence slices exclude each other"),
    ],
)
def test_what_needs_equal_microbatches_is_refused(capsys: Capture, arguments: list[str], words: str) -> None:
    assert main(["plan", "--schedule", "zb-h1", "--num-ranks", "4", *PASSES, *arguments]) == 2
    assert words in capsys.readouterr().err
