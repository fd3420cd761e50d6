"""Jobs whose layers the helper of the megatron-core on the path captures, with graphs of a fake TransformerEngine."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from tests.helpers import engine, stage_graphs
from tests.helpers.engine_layers import Wrapper, with_engine
from tests.helpers.graphed_engine import graphs_on_cpu
from tests.helpers.stage_graphs import MICROBATCH, SEQUENCE, Row

KIND = "layer graphs"
"""The name of such a job among those of ``tests.loops.run``."""
OF_VERSION = ({"cuda_graph_impl": "transformer_engine"}, {"external_cuda_graph": True})
"""How the configuration of a model asks for graphs: since 0.15, and before."""


def capture(model: Sequence[Any], count: int) -> Sequence[Any]:
    """Capture the layers of a model as a training loop of Megatron does; returns them."""
    from megatron.core.transformer import cuda_graphs

    if hasattr(cuda_graphs, "TECudaGraphHelper"):
        helper = cuda_graphs.TECudaGraphHelper(list(model), model[0].config, SEQUENCE, MICROBATCH, [])
        helper.create_cudagraphs()
    else:
        capture_as_0_13(model, count)
    return [layer for chunk in model for layer in chunk.module.module.decoder.layers]


def capture_as_0_13(model: Sequence[Any], count: int) -> None:
    """Call TransformerEngine as Megatron-LM's training loop did before there was a helper."""
    library = importlib.import_module("transformer_engine.pytorch")
    chunks = [list(chunk.module.module.decoder.layers) for chunk in model]
    inputs = [
        layer.get_layer_static_inputs(SEQUENCE, MICROBATCH) for own in chunks for _ in range(count) for layer in own
    ]
    numbers = range(1, len(chunks) + 1)
    graphs = library.make_graphed_callables(
        tuple(layer for own in chunks for layer in own),
        [(each.pop("hidden_states"),) for each in inputs],
        sample_kwargs=inputs,
        num_warmup_iters=11,
        allow_unused_input=True,
        fp8_enabled=False,
        _order=[number * sign for sign in (1, -1) for number in numbers for _ in range(count)],
    )
    given = iter(graphs)
    for own in chunks:
        for layer in own:
            layer.cuda_graphs = []
        for _ in range(count):
            for layer in own:
                layer.cuda_graphs.append(next(given))


def train(rank: int, schedule: str, release: str, graphs: bool, is_stock: bool) -> tuple[Any, int]:
    """What a job reads, and a digest of its weights; and the number of slots with graphs.

    Args:
        release: of TransformerEngine.
        is_stock: whether Megatron's own schedule runs.
    """
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer import TransformerConfig

    local_spec, passes = gpt_layer_specs.get_gpt_layer_local_spec, stage_graphs.passes
    counts, layers = [0], list[Any]()
    num_without = int(hasattr(TransformerConfig, "cuda_graph_impl"))  # until 0.14, jobs begin with graphs

    def captured_first(model: Sequence[Any], data: Sequence[Any], count: int, **options: Any) -> list[Any]:
        counts.append(count)
        if graphs and len(counts) == num_without + 2:
            layers.extend(capture(model, count))
        return passes(model, data, count, **options)

    def edit(patch: Any) -> None:
        patch.setattr(Wrapper, "fused", True)
        patch.setattr(gpt_layer_specs, "get_gpt_layer_local_spec", lambda: with_engine(local_spec()))
        patch.setattr(stage_graphs, "OF_VERSION", OF_VERSION)
        patch.setattr(stage_graphs, "passes", captured_first)

    options = {"bf16": True, "add_bias_linear": False}
    with engine.installed(release), graphs_on_cpu(lambda: counts[-1]):
        found, _ = stage_graphs.train(rank, Row(schedule, options=options), graphs, edit=edit, is_stock=is_stock)
    return found, sum(layer.cuda_graphs[0]._stage.num_slots for layer in layers)


def compared(rank: int, schedule: str, release: str, with_stock: bool) -> list[str]:
    """What differs with graphs from a run without, under Megatron's schedule or the same one; one line each."""
    eager, _ = train(rank, schedule, release, False, with_stock)
    graphed, slots = train(rank, schedule, release, True, False)
    wrong = {"other losses or weights": eager != graphed, "no graphs": not slots}
    return [f"{schedule}, rank {rank}: {what}" for what, holds in wrong.items() if holds]
