"""Published recipes fit into the GPUs that they run on."""

from __future__ import annotations

import argparse

import pytest

from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.cli.advise import changed
from megatron.zero_bubble.cli.gpu_memory import beyond
from megatron.zero_bubble.cli.job_as_is import JobAsIs, add_job_flags, read_job
from megatron.zero_bubble.cli.job_figures import CostsInput
from megatron.zero_bubble.core.costs.devices import DEVICES
from tests.cli.test_advise import SMALL, Capture, advice
from tests.helpers.published_memory import RECIPES

SOME = ("DeepSeek-V3, 256 H100, states on the host", "Llama 3 70B, 64 H100, FP8")
"""Recipes that are always planned."""
GIB = 2**30


def job(name: str, *more: str) -> tuple[argparse.Namespace, JobAsIs]:
    """A recipe as it is, on its GPUs."""
    recipe, verb = RECIPES[name], argparse.ArgumentParser()
    add_job_flags(verb)
    where = ["--gpu", recipe.gpu, "--nodes", str(recipe.num_gpus // 8), *more]
    options = verb.parse_args(where)
    return options, read_job(options, recipe.flags.split())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SOME else pytest.mark.full) for name in RECIPES]
)
def test_a_recipe_fits_into_its_gpu(name: str) -> None:
    """And takes more than a quarter of it, as authors use what they have."""
    options, found = job(name)
    memory = DEVICES[RECIPES[name].gpu].memory_gib * GIB
    assert memory / 4 < found.today.need.most <= memory
    assert beyond(options, found.today.need) is None


def test_a_job_that_does_not_fit_is_told_so() -> None:
    """With what to give, for an estimate and for measured costs."""
    options, found = job(SOME[0], "--gpu-memory", "40GiB")
    need = found.today.need
    said = beyond(options, need)
    assert said is not None and said.startswith(f"By this estimate, the job needs {need.most / GIB:.3g} GiB on rank ")
    assert f"rank {need.fullest}, more than the 40 GiB of --gpu-memory 40GiB: if it runs, the estimate is wrong" in said
    assert "give --costs with a file that its run has recorded (--zero-bubble-record-costs)" in said
    options.costs = CostsInput("measured.json")
    assert (beyond(options, need) or "").startswith("By measured.json, the job needs ")


def test_commands_print_the_sentence(capsys: Capture) -> None:
    """Where the job as it is needs more than its GPUs have; a dry run refuses a job that exceeds a given size."""
    wide = changed(SMALL, ["--hidden-size", "16384"], ())
    for own in (["--gpu-memory", "80GiB"], []):
        notes = advice(capsys, wide, "--quick", "--gpus-per-node", "4", *own)["job"]["notes"]
        assert sum(note.startswith("By this estimate, the job needs ") for note in notes) == 1
    assert main(["dry-run", "--gpus-per-node", "4", "--megatron-lm", "--", *wide]) == 0
    assert "more than the 80 GiB of --gpu h100: if it runs, the estimate is wrong for it" in capsys.readouterr().out
    notes = advice(capsys, SMALL, "--quick", "--gpus-per-node", "4")["job"]["notes"]
    assert not any("By this estimate" in note for note in notes)
