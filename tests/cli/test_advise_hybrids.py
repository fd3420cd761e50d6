"""``advise`` for hybrid models: their pattern has the stages, and changes start with the layers of their plans."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from megatron.zero_bubble.cli.advice_text import words_of
from megatron.zero_bubble.cli.advise import advised, changed, defaults
from megatron.zero_bubble.cli.job_as_is import read_job
from megatron.zero_bubble.cli.megatron_job import checked_megatron_job
from megatron.zero_bubble.core.formats.layout import job_layers, layout_text
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.planning.job.changes import JobChanges
from megatron.zero_bubble.planning.job.pattern import pattern_of

JOB = shlex.split(
    "--hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 1 --global-batch-size 16 "
    "--pipeline-model-parallel-size 2 --train-iters 10 --lr 1e-4 --vocab-size 65536 --bf16 --mamba-num-heads 32 "
    "--untie-embeddings-and-output-weights --tokenizer-type NullTokenizer --mock-data"
)
WORLD = 2


def options(**more: object) -> object:
    found = defaults()
    for name, value in {"nodes": 1, "gpus_per_node": WORLD, "gpu": "h100", "quick": True, **more}.items():
        setattr(found, name, value)
    return found


@pytest.mark.parametrize(
    "flags",
    [
        ("--hybrid-layer-pattern", "M*-MM*-MMM-M"),
        ("--hybrid-layer-pattern", "M*-M|M*-MMM-M"),
        ("--hybrid-layer-pattern", "M*-|MM*|-MM|M-M"),
        ("--hybrid-layer-pattern", "M*-MM*-MMM-M", "--decoder-first-pipeline-num-layers", "7"),
        ("--hybrid-override-pattern", "M*-MM*-MMM-M"),
    ],
    ids=" ".join,
)
def test_changes_start_with_the_layers_that_they_are_planned_with(flags: tuple[str, ...]) -> None:
    argv = [*JOB, *flags]
    own = read_job(options(), argv)  # type: ignore[arg-type]
    placement, pattern = own.today.timeline.schedule.placement, pattern_of(own.parsed.args)
    changes = JobChanges(placement, own.costs, 2.0**36, 1e6, setup=own.parsed.setup, pattern=pattern).changes()
    started, names = set(), set()
    for change in changes:
        setup, layers = change.setup, own.costs.layout(change.placement)
        if change.question.by_cost:
            most = layers.index(max(layers))
            layers = tuple(count - (s == most) + (s == len(layers) - 1) for s, count in enumerate(layers))
            setup = replace(setup, layout=layout_text(layers))
        refused = own.parsed.refused(setup, change.adds, change.drops)
        names.add(change.name)
        if refused is not None:
            assert "slices" in change.name or "sharded" in change.name, refused.reason
            continue
        words = words_of(setup, change.adds, change.drops, own.parsed.setup, argv)
        assert not any("pipeline-model-parallel-layout" in word or "virtual" in word for word in words.add)
        job = checked_megatron_job(changed(argv, *words), WORLD, WORLD)
        assert job.args.placement == change.placement and job_layers(job.args) == layers, change.name
        started.add(change.name)
    is_old = flags[0] == "--hybrid-override-pattern"
    assert {"zb-h1", "zb-auto linear", "zb-auto linear, vocabulary 2"} <= started
    others = {"zb-v", "interleaved-1f1b x2", "zb-auto vee, layout", "zb-auto vee, vocabulary 2"}
    assert others <= started or (is_old and not any("vee" in name or " x" in name for name in names))


def test_interleaving_of_megatron_is_given_by_a_pattern() -> None:
    own = read_job(options(), [*JOB, "--hybrid-layer-pattern", "M*-MM*-MMM-M"])  # type: ignore[arg-type]
    pipeline = JobChanges(
        Placement.linear(2), own.costs, 2.0**36, 1e6, setup=own.parsed.setup, pattern=pattern_of(own.parsed.args)
    )
    change = next(change for change in pipeline.named_changes() if change.name == "Megatron's interleaving x2")
    words = words_of(change.setup, change.adds, change.drops, own.parsed.setup, JOB)
    assert not change.adds and change.setup.layout is not None and "virtual" not in " ".join(words.add)
    on = Placement.interleaved(2, 2)
    assert own.costs.division is not None and own.costs.division.on(on) == own.costs.layout(on)


def test_a_pipeline_of_another_size_has_the_pattern_without_its_stages() -> None:
    argv = [*JOB, "--hybrid-layer-pattern", "M*-M|M*-MMM-M"]
    found = advised(options(may_change="pipeline", gpus_per_node=4), argv)  # type: ignore[arg-type]
    assert not [each for each in found.advice.dropped if each.name == "pipeline 4"], found.advice.dropped
