"""Chunks that a framework builds itself, as mbridge, mcore-bridge and mcore_adapter do, on a V and in a wave."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig
from tests.helpers.ranks import RankPool
from tests.helpers.rows import some
from tests.loops.loops import batches, passes
from tests.loops.models import SEQUENCE, VOCABULARY, destroy_groups, on_pipeline

WAVE = {"schedule": "zb-auto", "placement": "wave", "num_chunks": 4}
BF16 = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
EXPERTS = {
    "num_moe_experts": 2,
    "add_bias_linear": False,
    "moe_layer_freq": [0, 1, 1, 0],
    "moe_token_dispatcher_type": "alltoall",
}


class Row(NamedTuple):
    schedule: Mapping[str, Any]
    options: Mapping[str, Any] = {}
    num_layers: int = 4
    num_ranks: int = 2
    tied: bool = False


ROWS = {
    "zb-v": Row({"schedule": "zb-v"}),
    "v-half, tied, bf16": Row({"schedule": "v-half"}, BF16, tied=True),
    "zb-v, experts in some layers": Row({"schedule": "zb-v"}, EXPERTS),
    "zb-v, uneven layout": Row(
        {"schedule": "zb-v"},
        {"pipeline_model_parallel_layout": "Et|t*3||t*2L", **EXPERTS, "moe_layer_freq": [0] * 5 + [1]},
        6,
    ),
    "wave": Row(WAVE, num_layers=8, tied=True),
    "zb-v, four ranks, bf16": Row({"schedule": "zb-v"}, BF16, num_layers=8, num_ranks=4),
}


def settings(row: Row) -> Any:
    """The configuration of a model on the ranks of a row."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer import TransformerConfig

    virtual_size = row.schedule.get("num_chunks", 2)
    config = TransformerConfig(
        num_layers=row.num_layers,
        hidden_size=16,
        num_attention_heads=4,
        **{**on_pipeline(row.num_ranks, virtual_size), **row.options},
    )
    config.finalize_model_grads_func = finalize_model_grads
    return config


def make(config: Any, row: Row, **stage: Any) -> Any:
    """One chunk, with the specs of its layers only."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=stage["vp_stage"])
    return GPTModel(config, spec, VOCABULARY, 2 * SEQUENCE, share_embeddings_and_output_weights=row.tied, **stage)


def by_framework(config: Any, row: Row) -> list[Any]:
    """A framework asks megatron-core which ends a chunk has, and knows nothing of placements."""
    from megatron.core import parallel_state

    chunks = []
    for number in range(config.virtual_pipeline_model_parallel_size):
        place = {"ignore_virtual": False, "vp_stage": number}
        first, last = parallel_state.is_pipeline_first_stage(**place), parallel_state.is_pipeline_last_stage(**place)
        chunks.append(make(config, row, pre_process=first, post_process=last, vp_stage=number))
    return chunks


def by_us(config: Any, row: Row) -> list[Any]:
    import megatron.zero_bubble

    return megatron.zero_bubble.build_stages(partial(make, config, row))


def wrapped(config: Any, chunks: Sequence[Any]) -> list[Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    inner = [Float16Module(config, chunk) for chunk in chunks] if config.bf16 else chunks
    return [DistributedDataParallel(config, DistributedDataParallelConfig(), chunk) for chunk in inner]


def checkpoint_of(chunks: Sequence[Any]) -> list[tuple[Any, ...]]:
    """What the chunks say of their weights in a checkpoint: names, shapes and places in the whole weights."""
    found = []
    for chunk in chunks:
        for name, part in sorted(chunk.sharded_state_dict().items()):
            if hasattr(part, "global_offset"):
                found.append((name, part.key, part.global_shape, part.global_offset, part.replica_id))
    return found


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().float().numpy().tobytes()).hexdigest()[:16]


@contextmanager
def pipeline(row: Row) -> Iterator[Any]:
    """Context with the schedule and the groups of a row; gives the configuration of its model."""
    from megatron.core import parallel_state, tensor_parallel

    import megatron.zero_bubble

    destroy_groups()
    megatron.zero_bubble.apply(ZeroBubbleConfig(**row.schedule, fuse_wgrad=False))
    try:
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=row.num_ranks,
            virtual_pipeline_model_parallel_size=row.schedule.get("num_chunks", 2),
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(7)
        torch.manual_seed(7)
        yield settings(row)
    finally:
        megatron.zero_bubble.revert()
        destroy_groups()


def mean_square(_batch: Any, logits: torch.Tensor) -> Any:
    value = logits.float().square().mean()
    return value, {"loss": value.detach()}


def train(rank: int, row: Row, builders: Sequence[Any]) -> list[Any]:
    """What each builder's chunks are, the losses of two steps of SGD, and the weights after these."""
    outcomes = []
    for build in builders:
        with pipeline(row) as config:
            chunks = build(config, row)
            layers = [
                [(each.layer_number, type(each.mlp).__name__) for each in chunk.decoder.layers] for chunk in chunks
            ]
            described, model, losses = checkpoint_of(chunks), wrapped(config, chunks), []
            for step in range(2):
                for chunk in model:
                    chunk.zero_grad_buffer()
                losses += [digest(each["loss"]) for each in passes(model, batches(4, step), mean_square)]
                with torch.no_grad():
                    for parameter in (parameter for chunk in model for parameter in chunk.parameters()):
                        parameter -= 0.1 * parameter.main_grad
            weights = [(name, digest(each)) for chunk in chunks for name, each in chunk.named_parameters()]
            outcomes.append((layers, described, losses, weights))
    return outcomes


@pytest.mark.parametrize("name", some(ROWS, *(name for name in ROWS if "four" not in name)))
def test_chunks_of_a_framework_equal_those_of_build_stages(ranks: RankPool, name: str) -> None:
    row = ROWS[name]
    for ours, of_framework in ranks.run(row.num_ranks, train, row, (by_us, by_framework), timeout=120):
        for expected, found in zip(ours, of_framework, strict=True):
            assert found == expected


def get_model(model_provider_func: Any, model_type: Any = None) -> list[Any]:
    """Megatron-LM's function, which gives the ends of the model to the first and the last rank."""
    from megatron.core import parallel_state

    place, size = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    ends = [(place == number == 0, place == size - 1 and number == 1) for number in range(2)]
    return [model_provider_func(pre_process=a, post_process=b, vp_stage=n) for n, (a, b) in enumerate(ends)]


def train_by_megatron(rank: int, row: Row) -> list[Any]:
    """``train`` with chunks of a framework that has imported Megatron-LM's function before the schedule is applied."""
    modules = {name: ModuleType(name) for name in ("megatron.training.training", "some_framework")}
    for module in modules.values():
        vars(module)["get_model"] = get_model
    sys.modules.update(modules)
    try:
        of_framework: Any = sys.modules["some_framework"]
        return train(rank, row, (by_us, lambda config, row: of_framework.get_model(partial(make, config, row))))
    finally:
        assert all(vars(sys.modules.pop(name))["get_model"] is get_model for name in modules)


def test_chunks_of_megatrons_own_builder_equal_those_of_build_stages(ranks: RankPool) -> None:
    for ours, of_framework in ranks.run(2, train_by_megatron, ROWS["v-half, tied, bf16"], timeout=120):
        assert of_framework == ours


def by_rank(config: Any, row: Row) -> list[Any]:
    """A framework that asks whether its rank is the last one, as Megatron-Bridge does."""
    from megatron.core import parallel_state

    rank, last = parallel_state.get_pipeline_model_parallel_rank(), row.num_ranks - 1
    ends = [(rank == number == 0, rank == last and number == 1) for number in range(2)]
    return [make(config, row, pre_process=a, post_process=b, vp_stage=chunk) for chunk, (a, b) in enumerate(ends)]


def on_own_rank(config: Any, row: Row) -> list[Any]:
    """A framework that names its pipeline rank when it asks for the layers of a chunk, which then are Megatron's."""
    from megatron.core import parallel_state

    from megatron.zero_bubble.integration.adapter.placement import as_pipeline_rank

    with as_pipeline_rank(parallel_state.get_pipeline_model_parallel_rank()):
        return by_framework(config, row)


def one_chunk(config: Any, row: Row) -> list[Any]:
    return by_us(config, row)[:1]


def without_a_layer(config: Any, row: Row) -> list[Any]:
    """The second rank of the pipeline loses the layer of its first chunk, and then finds another one there."""
    from megatron.core import parallel_state

    chunks = by_us(config, row)
    if parallel_state.get_pipeline_model_parallel_rank() == 1:
        for layer in chunks[0].decoder.layers:
            layer.layer_number += 1
    return chunks


def refusal(rank: int, row: Row, build: Any) -> str:
    """What the first call says."""
    with pipeline(row) as config, pytest.raises(UserError) as caught:
        passes(wrapped(config, build(config, row)), batches(4, 0), mean_square)
    return str(caught.value)


WRONG = {
    by_rank: "stage 7 of schedule 'zb-v' has the wrong model chunk: embedding False, output layer False; build",
    on_own_rank: "the layers of schedule 'zb-v' must follow each other along its stages: stage 4 must begin with layer "
    "5, after layer 4 of stage 3; got layer 8; build the chunks with megatron.zero_bubble.build_stages(",
    one_chunk: "schedule 'zb-v' has 2 stages on this rank, so the model must have 2 chunks; got 1; build",
    without_a_layer: "the layers of schedule 'zb-v' must follow each other along its stages: stage 1 must begin with "
    "layer 2, after layer 1 of stage 0; got layer 3; build",
}


@pytest.mark.parametrize("build", WRONG, ids=lambda build: build.__name__)
def test_wrong_chunks_are_refused_on_every_rank(ranks: RankPool, build: Any) -> None:
    (said,) = set(ranks.run(4, refusal, Row({"schedule": "zb-v"}, num_layers=8, num_ranks=4), build))
    assert said.startswith(WRONG[build])
    assert said.endswith("such as zb-h1 (docs/frameworks.md says which frameworks can build others)")
    assert "virtual" not in said


def groups_before(rank: int, is_tied: bool) -> str | None:
    """The refusal of chunks whose groups were made before the schedule was applied, or None."""
    from megatron.core import parallel_state, tensor_parallel

    import megatron.zero_bubble

    destroy_groups()
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2, create_gloo_process_groups=False
    )
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    megatron.zero_bubble.apply("zb-v")
    row = Row({"schedule": "zb-v"}, num_layers=8, num_ranks=4, tied=is_tied)
    try:
        by_framework(settings(row), row)
    except UserError as error:
        return str(error)
    finally:
        megatron.zero_bubble.revert()
        destroy_groups()
    return None


def test_only_tied_models_need_the_embedding_group_of_the_placement(ranks: RankPool) -> None:
    """With another group, ranks would wait for each other while they sum the embedding."""
    (said,) = set(ranks.run(4, groups_before, True))
    assert said is not None
    assert said.startswith("the stages with the embedding are on ranks [0], which must form the embedding group; ")
    assert ranks.run(4, groups_before, False) == [None] * 4


def orders(_rank: int) -> list[bool]:
    from megatron.zero_bubble.integration.adapter.chunks import Layers, wrong_order

    def is_wrong(*ends: Any) -> bool:
        return wrong_order("zb-v", [Layers(*each) for each in enumerate(ends)]) is not None

    return [
        is_wrong((1, 1), (2, 2), (4, 4), (3, 3)),
        is_wrong((1, 2), (2, 3)),
        is_wrong((1, 2), (), (4, 4)),
        is_wrong((1, 2), (3, 3), (), (4, 6), ()),  # an uneven layout, or stages with embedding and loss only
        is_wrong((), (1, 2)),
        is_wrong((1, 2), None, (1, 1)),  # a model without numbers
        is_wrong((1, 2), (1, 3), (1, 2)),  # a model that numbers the layers of each stage
    ]


def test_layers_follow_each_other(ranks: RankPool) -> None:
    assert ranks.run(1, orders) == [[True, True, True, False, False, False, False]]


def by_wrapper(config: Any, row: Row) -> list[Any]:
    """An untied model of one's own, which has no method that returns a shared weight."""
    from megatron.core.transformer.module import MegatronModule

    import megatron.zero_bubble

    class Own(MegatronModule):
        share_embeddings_and_output_weights = False

        def __init__(self, **stage: Any) -> None:
            super().__init__(config)
            self.pre_process, self.post_process = stage["pre_process"], stage["post_process"]
            self.gpt = make(config, row, **stage)
            self.model_type = self.gpt.model_type
            self.set_input_tensor = self.gpt.set_input_tensor
            self.decoder = self.gpt.decoder

        def forward(self, *args: Any) -> Any:
            return self.gpt(*args)

    return megatron.zero_bubble.build_stages(Own)


@pytest.mark.parametrize("schedule", [{"schedule": "zb-v"}, WAVE], ids=("V", "wave"))
def test_an_untied_model_need_not_have_a_shared_weight(ranks: RankPool, schedule: Mapping[str, Any]) -> None:
    row = Row(schedule, num_layers=2 * schedule.get("num_chunks", 2))
    for ours, own in ranks.run(2, train, row, (by_us, by_wrapper), timeout=120):
        assert own[0] == ours[0] and own[2] == ours[2]
        assert [(name.removeprefix("gpt."), weight) for name, weight in own[3]] == ours[3]
