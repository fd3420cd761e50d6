"""What crosses the boundaries between stages is described per producing stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Message, Value
from megatron.zero_bubble.core.ir.passes import B, F, Pass
from megatron.zero_bubble.core.schedules import build
from megatron.zero_bubble.engine.runtime.packing import TensorSpec
from tests.helpers.ranks import RankPool

SCHEDULES = ("zb-h1", "interleaved-1f1b", "zb-v")


class Group:
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = lambda: rank, lambda: size


def widened(*, seq_length: int, micro_batch_size: int, config: Any, pp_group: Any, is_recv: bool, **_: Any) -> Any:
    """As Megatron's function for hyper-connections: all but the two ends have several streams."""
    is_end = pp_group.rank() == (0 if is_recv else pp_group.size() - 1)
    return [(seq_length, micro_batch_size, config.hidden_size * (1 if is_end else config.num_residual_streams))]


def growing(*, seq_length: int, micro_batch_size: int, config: Any, pp_group: Any, is_recv: bool, **_: Any) -> Any:
    stage = pp_group.rank() + (not is_recv)
    return [(seq_length, micro_batch_size, config.hidden_size * (1 + stage))]


def constant(**_: Any) -> Any:
    return [(8, 2, 4)]


def of_two(**_: Any) -> Any:
    return [(8, 2, 4), (4, 2, 4)]


def disagreeing(*, pp_group: Any, is_recv: bool, **given: Any) -> Any:
    return growing(pp_group=pp_group, is_recv=is_recv and pp_group.rank() < 2, **given)


def outputs(
    rank: int, function: Callable[..., Any], schedules: Sequence[str], more: dict[str, Any], pairs: bool = False
) -> list[Any]:
    """The shapes of what every stage hands on, on this rank of two; or the refusal."""
    from megatron.core.pipeline_parallel import schedules as upstream

    from megatron.zero_bubble.integration.adapter.boundary import Boundary

    config = SimpleNamespace(
        hidden_size=4,
        num_residual_streams=3,
        sequence_parallel=False,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_layout=None,
    )
    vars(config).update(more)
    chunk = torch.nn.Identity()
    chunk.model_type = None  # type: ignore[assignment]
    groups = SimpleNamespace(pp=Group(rank, 2), tp=Group(0, 1), cp=Group(0, 1))
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upstream, "get_tensor_shapes", function)
        for name in schedules:
            schedule = replace(build(name, num_ranks=2, num_microbatches=4), overlap_experts=pairs)
            try:
                boundary = Boundary.of(config, groups, 8, 2, None, None, chunk, torch.device("cpu"), schedule)
            except UserError as error:
                found.append(str(error))
            else:
                found.append([spec.shape for output in boundary.outputs for spec in output])
    return found


def test_all_stages_between_the_ends_send_the_streams_of_hyper_connections(ranks: RankPool) -> None:
    wide = (8, 2, 12)
    assert ranks.run(2, outputs, widened, SCHEDULES, {}) == [[[wide], [wide] * 3, [wide] * 3]] * 2


def test_the_width_belongs_to_the_stage_and_not_to_its_rank(ranks: RankPool) -> None:
    grown = [(8, 2, 4 * times) for times in (2, 3, 4)]
    assert ranks.run(2, outputs, growing, SCHEDULES, {}) == [[grown[:1], grown, grown]] * 2


def test_stages_that_do_not_agree_are_refused_on_every_rank(ranks: RankPool) -> None:
    [(said,), (by_other,)] = ranks.run(2, outputs, disagreeing, SCHEDULES[-1:], {})
    assert said == by_other
    assert said.startswith(
        "what a stage sends must be what the next one receives; this model's stage 1 of 4 sends [(8, 2, 12)] and stage "
        "2 expects [(8, 2, 16)] (tokens, sequences, hidden size); leave out"
    )


def layout(*stages: str) -> Any:
    """A layout on two ranks, as Megatron parses it; e, t, m, l: embedding, layer, prediction, loss."""
    names = {"e": "embedding", "t": "decoder", "m": "mtp", "l": "loss"}
    of_stages = [[SimpleNamespace(name=names[letter]) for letter in stage] for stage in stages]
    return SimpleNamespace(
        virtual_pipeline_model_parallel_size=len(stages) // 2,
        pipeline_model_parallel_size=2,
        layout=[of_stages[rank::2] for rank in range(2)],
    )


def test_predictions_are_concatenated_until_a_stage_has_their_losses(ranks: RankPool) -> None:
    of_one = {"mtp_standalone": True, "pipeline_model_parallel_layout": layout("et", "tmm", "", "lll")}
    of_two = {"mtp_standalone": True, "pipeline_model_parallel_layout": layout("et", "tmm", "ll", "l")}
    for more, lengths in ((of_one, (8, 24, 24)), (of_two, (8, 24, 8))):
        found = ranks.run(1, outputs, constant, SCHEDULES[2:], more)
        assert found == [[[(length, 2, 4) for length in lengths]]]


def test_layers_in_pairs_hand_on_one_tensor(ranks: RankPool) -> None:
    [(said,)] = ranks.run(1, outputs, of_two, SCHEDULES[2:], {}, True)
    assert said.startswith("in schedules with pairs, every stage must hand on one tensor, ")
    assert said.endswith("got zb-v for a model whose stages hand on [2, 2, 2]; give a schedule without pairs")


@pytest.mark.parametrize("option", ["num_moe_experts", "mtp_num_layers"])
def test_losses_beside_that_of_the_last_stage_need_one_tensor(ranks: RankPool, option: str) -> None:
    [(said,)] = ranks.run(1, outputs, of_two, SCHEDULES[2:], {option: 4}, False)
    assert said.startswith("with experts or multi-token prediction, every stage must hand on one tensor, because ")
    assert f"got {option}=4 for a model whose stages hand on [2, 2, 2]; concatenate" in said


FORWARD, BACKWARD = (Message(Value(Pass(stage, kind, 0)), 0, 1) for stage, kind in ((0, F), (1, B)))
STATES, MASK = torch.zeros(8, 2, 4), torch.zeros(8, dtype=torch.int64)
TENSORS = TensorSpec((8, 2, 4), torch.float32), TensorSpec((8,), torch.int64)


class Sent:
    """Channels that keep what is sent."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.post = self.settle = lambda *_: None
        self.send = lambda _, value: self.values.append(value)


def checked(kind: str, num_tensors: int) -> tuple[Any, Any, Sent]:
    """A boundary below one stage, its channels in the first iteration, and what they send."""
    from megatron.zero_bubble.integration.adapter import boundary

    described = getattr(boundary, kind)((8, 2, 4), (TENSORS[:num_tensors],), torch.device("cpu"), (8,))
    sent = Sent()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boundary, "HeaderedChannels", lambda *_: sent)
        return described, described.checked(sent, object()), sent


def test_a_tensor_in_place_of_several_is_refused() -> None:
    _, channels, sent = checked("Boundary", 2)
    with pytest.raises(UserError, match=r"got \(8, 2, 4\) in float32 from .* in place of .* and \(8,\) in int64"):
        channels.send(FORWARD, STATES)
    assert not sent.values


def test_when_all_ranks_stop_a_buffer_is_sent_in_place_of_tensors() -> None:
    described, channels, sent = checked("Boundary", 2)
    for message in (FORWARD, BACKWARD):
        channels.send(message, described.new_buffer(message))
    assert len(sent.values) == 2


def test_headers_say_shapes_but_no_dtypes() -> None:
    _, channels, sent = checked("HeaderedBoundary", 1)
    for value in (STATES[:5], None):
        channels.send(FORWARD, value)
    for wrong in (STATES.double(), (STATES, MASK)):
        with pytest.raises(UserError, match="in place of .* in float32 "):
            channels.send(FORWARD, wrong)
    assert len(sent.values) == 2


@pytest.mark.parametrize("declared", [[], [((1, 1, 2, 2, 4), torch.float32)]], ids=["none", "five dimensions"])
def test_what_a_model_declares_fits_into_a_header(declared: list[Any]) -> None:
    from megatron.zero_bubble.integration.adapter.stage_outputs import outputs_of

    model: Any = torch.nn.Identity()
    upstream: Any = SimpleNamespace(num_stages=3, hidden=(8, 2, 4))
    model.stage_output = lambda stage, *_: [((8, 2, 4), torch.float32)] if stage == 0 else declared
    with pytest.raises(UserError, match="of at most 4 dimensions each; stage_output of the model gives .* for stage 1"):
        outputs_of(upstream, (0,), None, model)
