"""Parts of sequence slices without a pipeline: data, reports, hooks, and what they refuse."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Pass
from megatron.zero_bubble.core.ir.passes import F
from megatron.zero_bubble.core.schedules import build
from tests.helpers.ranks import RankPool


def test_every_slice_gets_a_copy_of_its_microbatchs_batch() -> None:
    from megatron.zero_bubble.integration.adapter.slice_data import RepeatedBatches

    source = iter([{"tokens": 0}, {"tokens": 1}, {"tokens": 2}])
    batches = RepeatedBatches(source)
    for microbatch in range(3):
        for slice_ in range(4):
            batches.begin(slice_)
            batch = next(batches)
            assert batch == {"tokens": microbatch}
            batch.clear()  # as Megatron-LM does with what it has moved to the GPU
        batches.end()
    assert next(source, None) is None


def test_slices_repeat_all_items_that_a_forward_reads() -> None:
    from megatron.zero_bubble.integration.adapter.slice_data import RepeatedBatches

    batches = RepeatedBatches(iter(range(6)))
    read = []
    for _ in range(3):
        for slice_ in range(2):
            batches.begin(slice_)
            read.append((next(batches), next(batches)))
    assert read == [(0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5)]


def test_reports_add_losses_and_count_tokens_once() -> None:
    from megatron.zero_bubble.integration.adapter.slice_data import merged

    pair = [torch.tensor([1.0, 7.0]), torch.tensor([2.5, 7.0])]
    assert merged([{"lm loss": report} for report in pair])["lm loss"].tolist() == [3.5, 7.0]
    assert merged([{"lm loss": (one[0], one[1])} for one in pair])["lm loss"] == (3.5, 7.0)
    assert merged([{"mean": torch.tensor(0.25)}] * 4)["mean"] == 1.0
    assert merged([{"mean": 0.25}] * 4) == {"mean": 1.0}
    assert merged(["anything"]) == "anything", "a whole sequence has one report"
    with pytest.raises(UserError, match="must report numbers, tensors or pairs .* got a str; report a tensor"):
        merged([{"loss": "0x1"}] * 2)


def test_last_backward_and_microbatches_in_flight() -> None:
    from megatron.zero_bubble.integration.adapter.stage import StageFacts

    schedule = build("seq-zb-h1", num_ranks=2, num_microbatches=5, num_slices=4)
    first, last = (StageFacts.of(schedule, stage) for stage in range(2))
    assert first.last_backward == last.last_backward == (4, 0)
    assert (first.max_in_flight, last.max_in_flight) == (2, 1) or (first.max_in_flight, last.max_in_flight) == (2, 2)


def test_message_is_as_long_as_its_slice() -> None:
    from megatron.zero_bubble.core.ir import Message, Value
    from megatron.zero_bubble.engine.runtime.packing import TensorSpec
    from megatron.zero_bubble.integration.adapter.boundary import Boundary

    output = (TensorSpec((24, 2, 16), torch.float32),)  # 48 tokens on two tensor-parallel ranks
    boundary = Boundary((24, 2, 16), (output,), torch.device("cpu"), (20, 34, 48))
    lengths = [len(boundary.new_buffer(Message(Value(Pass(0, F, 0, at)), 0, 1))) for at in range(3)]
    assert lengths == [10, 7, 7]


def test_transformer_engine_aligns_the_mask_with_the_last_token() -> None:
    from megatron.core.transformer.enums import AttnMaskType

    from megatron.zero_bubble.integration.adapter.slices import bottom_right

    assert bottom_right(AttnMaskType.causal) is AttnMaskType.causal_bottom_right
    for other in (AttnMaskType.no_mask, AttnMaskType.padding, None):
        with pytest.raises(UserError, match="need causal attention, .* train without slices"):
            bottom_right(other)


def test_predictions_whose_tokens_are_not_rolled_are_refused() -> None:
    """A Megatron that shifts tokens in another way would lose those that follow a slice."""
    from megatron.zero_bubble.integration.adapter.balancing import Balancing
    from megatron.zero_bubble.integration.adapter.history import Histories
    from megatron.zero_bubble.integration.adapter.recurrences import Recurrences
    from megatron.zero_bubble.integration.adapter.slices import SlicedChunk

    chunk = SlicedChunk(0, torch.nn.Identity(), None, (3, 8), Histories(), Balancing(), Recurrences())
    model = SimpleNamespace(config=SimpleNamespace(mtp_num_layers=1), mtp_process=True, post_process=False)
    given = {name: torch.zeros(1, 8, dtype=torch.int64) for name in ("input_ids", "position_ids")}
    tokens = {name: chunk._of_slice(name, each, True) for name, each in given.items()}
    torch.roll(tokens["input_ids"], -1, -1)
    with pytest.raises(UserError, match="expected {'input_ids': 1, 'position_ids': 1}, got {'input_ids': 1}; train"):
        chunk._check_rolls(model, given)
    torch.roll(tokens["position_ids"], -1, -1)
    chunk._check_rolls(model, given)


@pytest.mark.parametrize("rolled", [True, False])
def test_padding_is_rolled_with_the_tokens_where_megatron_rolls_it(rolled: bool) -> None:
    """Since 0.18. Positions that nothing embeds may stay as they are."""
    from megatron.zero_bubble.integration.adapter import slices, versions
    from megatron.zero_bubble.integration.adapter.balancing import Balancing
    from megatron.zero_bubble.integration.adapter.history import Histories
    from megatron.zero_bubble.integration.adapter.recurrences import Recurrences

    class Layer(torch.nn.Module):
        """A prediction, whose forward takes a mask of padding or not."""

        forward = (lambda self, input_ids, padding_mask: None) if rolled else (lambda self, input_ids: None)

    chunk = slices.SlicedChunk(0, torch.nn.Identity(), None, (3, 8), Histories(), Balancing(), Recurrences())
    config, embedding = SimpleNamespace(mtp_num_layers=1), SimpleNamespace(add_position_embedding=False)
    model = SimpleNamespace(config=config, embedding=embedding, mtp_process=True, post_process=False)
    given = {name: torch.zeros(1, 8) for name in ("input_ids", "position_ids", "padding_mask")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(versions, "MultiTokenPredictionLayer", Layer)
        names = slices._rolled_in(model)
        assert ("padding_mask" in names) == rolled
        tokens = {name: chunk._of_slice(name, each, name in names) for name, each in given.items()}
        torch.roll(tokens["input_ids"], -1, -1)
        if rolled:
            with pytest.raises(UserError, match="'padding_mask': 1}, got {'input_ids': 1}; train"):
                chunk._check_rolls(model, given)
            torch.roll(tokens["padding_mask"], -1, -1)
        chunk._check_rolls(model, given)


class TEDotProductAttention(torch.nn.Module):
    """A fake of Megatron's wrapper: it records its mask and takes keys of another length than the queries."""

    def forward(self, query: Any, keys: Any, values: Any, mask: Any, *, attn_mask_type: Any, **_: Any) -> Any:
        self.got = mask, attn_mask_type, len(keys)
        return values[: len(query)].flatten(2)


def _model() -> Any:
    from megatron.core import parallel_state, tensor_parallel

    from tests.integration.adapter.test_foreign_loop import build_model

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=1, create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    return build_model()


def _inputs(length: int = 8) -> dict[str, Any]:
    tokens = torch.zeros(2, length, dtype=torch.int64)
    positions = torch.arange(length).expand(2, -1)
    return {"input_ids": tokens, "position_ids": positions, "attention_mask": None, "labels": tokens}


def run_engines_attention(rank: int) -> list[tuple[Any, ...]]:
    """Run the slices of one microbatch with the fake attention; return what it got, per slice."""
    from megatron.core.transformer.enums import AttnMaskType

    from megatron.zero_bubble.integration.adapter.balancing import Balancing
    from megatron.zero_bubble.integration.adapter.history import Histories
    from megatron.zero_bubble.integration.adapter.recurrences import Recurrences
    from megatron.zero_bubble.integration.adapter.slices import SlicedChunk

    model, histories, got = _model(), Histories(), []
    for layer in model.module.decoder.layers:
        layer.self_attention.core_attention = attention = TEDotProductAttention()
    cached = model.module.decoder.layers[0].mlp.linear_fc1
    cached.disable_parameter_transpose_cache = False
    chunk = SlicedChunk(0, model, iter([]), (3, 8), histories, Balancing(), Recurrences())
    with chunk.hooked():
        assert cached.disable_parameter_transpose_cache, "no slice may overwrite main_grad"
        for slice_ in range(2):
            with chunk.forward(Pass(0, F, 0, slice_), frees=True):
                model(**_inputs())
            mask, mask_type, length = attention.got
            got.append((mask, mask_type is AttnMaskType.causal_bottom_right, length, len(histories)))
    assert not cached.disable_parameter_transpose_cache
    return got


def test_transformer_engines_attention_gets_keys_of_earlier_slices(ranks: RankPool) -> None:
    """An evaluation frees the keys with the last slice."""
    ((first, last),) = ranks.run(1, run_engines_attention)
    assert (first, last) == ((None, True, 3, 1), (None, True, 8, 0))


def refusals(rank: int) -> dict[str, str]:
    """Return the sentences of models and calls that cannot be cut."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron.zero_bubble.integration.adapter.balancing import Balancing
    from megatron.zero_bubble.integration.adapter.history import Histories
    from megatron.zero_bubble.integration.adapter.recurrences import Recurrences
    from megatron.zero_bubble.integration.adapter.slices import SlicedChunk

    said: dict[str, str] = {}

    def sentence(what: str, model: Any, **more: Any) -> None:
        chunk = SlicedChunk(0, model, None, (3, 8), Histories(), Balancing(), Recurrences())
        with pytest.raises(UserError) as raised, chunk.hooked(), chunk.at(Pass(0, F, 0)):
            model(**{**_inputs(), **more})
        said[what] = str(raised.value)

    sentence("another model", torch.nn.Linear(2, 2))
    sentence("packed", _model(), packed_seq_params=PackedSeqParams(qkv_format="thd"))
    sentence("embeddings", _model(), decoder_input=torch.zeros(8, 2, 16))
    sentence("nested", _model(), extra_block_kwargs={"visual": [torch.zeros(8, 2, 16)]})
    sentence("no labels", _model(), labels=None)
    sentence("length", _model(), **_inputs(7))
    sentence("mask", _model(), attention_mask=torch.zeros(2, 1, 1, 8, dtype=torch.bool))
    model = _model()
    model.module.decoder.layers[1].self_attention.core_attention = torch.nn.Identity()
    sentence("attention", model)
    model = _model()
    softmax = model.module.decoder.layers[1].self_attention.core_attention.scale_mask_softmax
    softmax.scaled_masked_softmax_fusion = softmax.input_in_float16 = True
    sentence("fused softmax", model)
    return said


def test_what_cannot_be_cut_is_refused_in_one_sentence(ranks: RankPool) -> None:
    (said,) = ranks.run(1, refusals)
    expected = {
        "another model": "got a Linear; train without slices",
        "packed": "got packed_seq_params; pad the samples, or train without slices",
        "embeddings": "got decoder_input, which would stay whole; leave it out, or train without slices",
        "nested": "got extra_block_kwargs, which would stay whole; leave it out, or train without slices",
        "no labels": "got no labels; pass labels to the model, or train without slices",
        "length": "must have seq_length = 8 tokens; got 7; pass the length of the batches as seq_length",
        "mask": "attention_mask must have seq_length = 8 tokens; got 1; pass",
        "attention": "DotProductAttention, MambaMixer or GatedDeltaNet; got Identity; train without slices",
        "fused softmax": "got masked_softmax_fusion=True; add --no-masked-softmax-fusion",
    }
    assert said.keys() == expected.keys()
    for what, end in expected.items():
        assert end in said[what] and "\n" not in said[what], said[what]
