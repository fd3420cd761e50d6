"""Costs per layer in a costs file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.zero_bubble import PassCosts, PassMemory, Placement
from megatron.zero_bubble.core.costs.layers import LayerFigures, of_stages
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.costs import CostsFile, costs_to_json, read_costs_file

DENSE = {"forward_ms": 2.0, "backward_ms": 4.0, "wgrad_ms": 1.0}
MEMORY = {"activation": 8.0, "wgrad": 4.0}
MIXED = {
    "comm_ms": 0.5,
    "links": [[0, 1, 2.0]],
    "layers": ["dense*2", "moe", "dense"],
    "parts": {
        "dense": {**DENSE, **MEMORY, "attention": 0.25},
        "moe": {**DENSE, **MEMORY, "history": 1.0, "attention": 0.5, "backward_attention": 0.1},
        "embedding": {"forward_ms": 0.25},
        "loss": {"wgrad_ms": 3.0, "activation": 2.0},
    },
}


def parse(content: object) -> CostsFile:
    return CostsFile.parse(json.dumps(content))


def test_layers_are_read_in_order() -> None:
    layers = parse(MIXED).layer_costs()
    assert layers is not None
    dense, moe = (
        LayerFigures(2.0, 4.0, 1.0, 8.0, 4.0, 0.0, 0.25, 0.25),
        LayerFigures(2.0, 4.0, 1.0, 8.0, 4.0, 1.0, 0.5, 0.1),
    )
    assert layers.layers == (dense, dense, moe, dense)
    assert (layers.embedding, layers.loss) == (LayerFigures(0.25), LayerFigures(wgrad_ms=3.0, activation=2.0))
    assert (layers.comm_ms, layers.links) == (0.5, {(0, 1): 2.0})


def test_layers_of_a_hybrid_model_are_its_pattern() -> None:
    slow = {"forward_ms": 3.0, "backward_ms": 5.0, "wgrad_ms": 1.5}
    layers = parse({"layers": "M-M*", "parts": {"M": slow, "*": DENSE, "-": DENSE}}).layer_costs()
    assert layers is not None and layers.work_ms == (9.5, 7.0, 9.5, 7.0)
    with pytest.raises(UserError, match=r"layers must name kinds of parts, which are \*, -, M; got 'E'"):
        parse({"layers": "M-E*", "parts": {"M": slow, "*": DENSE, "-": DENSE}})
    with pytest.raises(UserError, match="layers must have 1 to 10000 layers; got 0"):
        parse({"layers": "", "parts": {"M": slow}})


def test_without_a_layout_the_file_gives_megatrons_even_split() -> None:
    costs, memory = parse(MIXED).on(Placement.linear(2))
    assert costs.forward_ms == (4.25, 4.0) and costs.wgrad_ms == (2.0, 5.0)
    assert memory is not None and memory.activation == (16.0, 18.0)


def test_layers_without_memory_keep_the_same() -> None:
    layers = parse({"layers": ["dense*3"], "parts": {"dense": DENSE}}).layer_costs()
    assert layers is not None and {(part.activation, part.wgrad) for part in layers.layers} == {(1.0, 1.0)}


def test_recorded_stages_give_layers() -> None:
    per_stage = {"forward_ms": [4.5, 6.0, 7.0], "backward_ms": [4.0, 6.0, 8.0], "wgrad_ms": [2.0, 3.0, 4.0]}
    layers = parse({**per_stage, "layers_per_stage": [2, 3, 1], "comm_ms": 0.5}).layer_costs()
    assert layers is not None and layers.layers == (LayerFigures(2.0, 2.0, 1.0, 1.0, 1.0),) * 6
    assert (layers.embedding, layers.loss) == (LayerFigures(0.5), LayerFigures(5.0, 6.0, 3.0))
    assert parse(per_stage).layer_costs() is None


def test_recorded_stages_of_a_hybrid_model_give_layers_by_letter() -> None:
    per_stage = {
        "forward_ms": [4.5, 8.0, 7.0, 9.0],
        "backward_ms": [4.0, 6.0, 6.0, 8.0],
        "wgrad_ms": [2.0, 3.0, 3.0, 4.0],
    }
    file = parse({**per_stage, "layers_per_stage": ["MM", "M*M", "MM*M", "*"]})
    layers = file.layer_costs()
    assert layers is not None and layers.num_layers == 10 and file.layers_per_stage == (2, 3, 4, 1)
    assert layers.on((2, 3, 4, 1))[0].forward_ms == pytest.approx((4.5, 8.0, 7.0, 9.0))
    assert file.pattern is not None and file.pattern.cut((3, 7)) == "MMM|*MMM*M*"
    assert parse({**per_stage, "layers_per_stage": [2, 3, 4, 1]}).pattern is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": []}, "layers must have 1 to 10000 layers; got 0"),
        ({"layers": None}, r'layers must be a list of kinds in the order of the model, such as \["dense\*3"'),
        ({"layers": ["dense*0"]}, r"layers must be a list of kinds .* got 'dense\*0'"),
        ({"layers": ["dense*2", 3]}, "layers must be a list of kinds .* got 3"),
        ({"layers": ["dense*99999"]}, "layers must have 1 to 10000 layers; got 99999"),
        ({"layers": ["dense", "mamba"]}, "layers must name kinds of parts, which are dense, moe; got 'mamba'"),
        ({"layers": ["dense", "embedding"]}, "layers must name kinds of parts, .* got 'embedding'"),
        ({"layers": ["dense"]}, "every kind in parts must occur in layers; 'moe' does not; remove it"),
        ({"parts": [1]}, "parts must be an object with the figures of every kind of layer"),
        ({"parts": {"dense": 3}}, "parts must be an object"),
        ({"forward_ms": 3}, "either figures per layer .* or figures of passes; got forward_ms as well as layers"),
        ({"comm_ms": -1}, "comm_ms must be a finite number"),
        ({"unknown": 1}, "allowed keys are .*; got 'unknown'"),
    ],
)
def test_invalid_files_are_rejected(change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(MIXED | change)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"forward_ms": 1, "backward_ms": 1}, "parts.dense must have the key wgrad_ms, a number; it is missing"),
        (DENSE, "parts.dense must have the key activation, a number; it is missing"),
        ({**DENSE, **MEMORY, "forward_ms": -1}, "parts.dense: forward_ms must be a finite number, 0 or above; got -1"),
        ({**DENSE, **MEMORY, "speed": 1}, "allowed keys of parts.dense are forward_ms, .*; got 'speed'"),
        ({**DENSE, **MEMORY, "activation": 0}, "parts.dense: activation memory must be above 0"),
        ({**DENSE, **MEMORY, "attention": 2}, "parts.dense: forward_attention is a share"),
    ],
)
def test_invalid_parts_are_rejected(part: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(MIXED | {"parts": {**MIXED["parts"], "dense": part}})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"forward_ms": 2}, r"with layers_per_stage, forward_ms must be a list with one number for each of its 3"),
        ({"wgrad_ms": [1, 2]}, "with layers_per_stage, wgrad_ms must be a list with one number for each of its 3"),
        ({"layers_per_stage": 3}, r"number of layers of every stage, each 0 or above, as in \[3, 4, 3\], or .*; got 3"),
        ({"layers_per_stage": [1, -1, 1]}, r"each 0 or above, as in \[3, 4, 3\], or .*; got \[1, -1, 1\]"),
        ({"layers_per_stage": [1, "M", 1]}, r'letters of a hybrid model, as in \["M-M\*", "M-ME"\]; got \[1, "M", 1\]'),
        ({"layers_per_stage": [1, 0, 1]}, "layers_per_stage must give layers to a stage between the first"),
        (
            {"layers_per_stage": [1, 10**12, 1]},
            "layers_per_stage must have at most 10,000 layers; got 1,000,000,000,002",
        ),
        (
            {"embedding": {"forward_ms": 1.1}},
            "forward_ms of embedding must be at most .*; got 1.1 and 1; give a smaller",
        ),
        (
            {"loss": {"wgrad_ms": 99}},
            "wgrad_ms of loss must be at most that of its stage, .*; got 99 and 3; .*out loss",
        ),
    ],
)
def test_invalid_layers_per_stage_are_rejected(content: dict[str, object], message: str, tmp_path: Path) -> None:
    whole = {name: [1, 2, 3] for name in ("forward_ms", "backward_ms", "wgrad_ms")} | {"layers_per_stage": [1, 2, 3]}
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(whole | content))
    with pytest.raises(UserError, match=message) as failure:
        read_costs_file(file).layer_costs()
    assert str(failure.value).startswith(f"costs file {file}: ")


def test_layers_are_counted_before_they_are_listed() -> None:
    """The listed ones would need terabytes."""
    with pytest.raises(UserError, match="layers must have 1 to 10000 layers; got 9999900000"):
        parse(MIXED | {"layers": ["dense*99999"] * 100_000})


def test_an_end_may_be_all_of_its_stage_up_to_rounding() -> None:
    times = {name: [1.0, 2.0, 3.0] for name in ("forward_ms", "backward_ms", "wgrad_ms")}
    ends = {"loss": {"forward_ms": 3.0000001, "backward_ms": 3.0, "wgrad_ms": 2.9999999}}
    layers = parse({**times, **ends, "layers_per_stage": [1, 2, 0]}).layer_costs()
    assert layers is not None and layers.loss.forward_ms == 3.0000001


def test_recorded_ends_are_written_and_may_be_corrected() -> None:
    costs = PassCosts((4.0, 5.0), (4.0, 6.0), (4.0, 7.0)).with_attention((0.5, 0.4))
    memory = PassMemory((8.0, 9.0), (4.0, 6.0))
    text = costs_to_json(costs, memory, layers_per_stage=(4, 4))
    content = json.loads(text)
    assert content["embedding"] == {}, "two stages do not tell the embedding from layers"
    assert content["loss"] == {
        "forward_ms": 1.0,
        "backward_ms": 2.0,
        "wgrad_ms": 3.0,
        "activation": 1.0,
        "wgrad": 2.0,
    }
    assert CostsFile.parse(text).layer_costs() == of_stages(costs, memory, (4, 4))
    content["embedding"] = {"forward_ms": 1.0, "wgrad_ms": 2.0}
    content["loss"] |= {"forward_ms": 2.0, "wgrad_ms": 5.0}
    layers = parse(content).layer_costs()
    assert layers is not None
    assert [part.forward_ms for part in layers.layers] == [0.75] * 8
    again, kept = layers.on((4, 4))
    assert (again.forward_ms, again.backward_ms, again.wgrad_ms) == ((4.0, 5.0), (4.0, 6.0), (4.0, 7.0))
    assert (kept.activation, kept.wgrad) == ((8.0, 9.0), (4.0, 6.0))
    for wrong, message in (
        ({"loss": 3}, "loss must be an object with the figures"),
        ({"loss": {"forward": 3}}, "keys of parts.loss must be figures of layers"),
        ({"layers_per_stage": None}, "embedding needs layers_per_stage"),
    ):
        own = {key: value for key, value in (content | wrong).items() if value is not None}
        with pytest.raises(UserError, match=message):
            parse(own)


def test_figures_of_ranks_stay_with_another_number_of_stages() -> None:
    """Recorded on a V: the times of the vocabulary are per rank, those of the layers per stage."""
    times = {name: [1.0, 2.0, 2.0, 1.0] for name in ("forward_ms", "backward_ms", "wgrad_ms")}
    shards = {"output_ms": [1, 2], "output_wgrad_ms": [3, 4], "activation": [1.0] * 4, "wgrad": [1.0] * 4, "logits": 7}
    file = parse({**times, **shards, "layers_per_stage": [1, 2, 2, 1]})
    assert file.layer_costs() is not None
    on = [file.on(placement) for placement in (Placement.linear(2), Placement.vee(2), Placement.interleaved(2, 3))]
    for costs, memory in (*on, file.on_layout(Placement.linear(2), (2, 4))):
        assert costs.vocabulary is not None and costs.vocabulary.output_ms == (1.0, 2.0)
        assert memory is not None and memory.logits == (7.0, 7.0)
        assert sum(costs.forward_ms) == pytest.approx(6.0)
    without_memory = parse({**times, "layers_per_stage": [1, 2, 2, 1]})
    assert without_memory.on_layout(Placement.linear(2), (2, 4))[1] is None
