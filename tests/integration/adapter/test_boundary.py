"""The shapes of messages, which must be the same between all stages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.zero_bubble.core.errors import UserError
from tests.helpers.ranks import RankPool


class Group:
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = lambda: rank, lambda: size


def shapes_of(_rank: int, num_streams: int) -> list[Any]:
    """What two of three ranks send, or their refusals, if the stages between the ends exchange several streams."""
    from megatron.core.pipeline_parallel import schedules

    from megatron.zero_bubble.integration.adapter.boundary import Boundary

    def newer(
        *, seq_length: int, micro_batch_size: int, decoder_seq_length: Any, config: Any, pp_group: Any, is_recv: bool
    ) -> Any:
        is_end = pp_group.rank() == (0 if is_recv else pp_group.size() - 1)
        return [(seq_length, micro_batch_size, config.hidden_size * (1 if is_end else num_streams))]

    config = SimpleNamespace(
        hidden_size=4, sequence_parallel=False, pipeline_dtype=torch.float32, pipeline_model_parallel_layout=None
    )
    chunk = torch.nn.Identity()
    chunk.model_type = None  # type: ignore[assignment]
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedules, "get_tensor_shapes", newer)
        for rank in (0, 1):
            groups = SimpleNamespace(pp=Group(rank, 3), tp=Group(0, 1), cp=Group(0, 1))
            try:
                boundary = Boundary.of(config, groups, 8, 2, None, None, chunk, torch.device("cpu"))
            except UserError as error:
                found.append(str(error))
            else:
                found.append((boundary.activation, boundary.gradient))
    return found


def test_stages_that_send_different_shapes_are_refused_on_every_rank(ranks: RankPool) -> None:
    assert ranks.run(1, shapes_of, 1) == [[((8, 2, 4), (8, 2, 4))] * 2]
    [(said, by_other)] = ranks.run(1, shapes_of, 3)
    assert said == by_other
    assert said.startswith(
        "zero-bubble schedules send one tensor of the same shape between all stages; Megatron's own would send "
        "[(8, 2, 4)] or [(8, 2, 12)] (tokens, sequences, hidden size) in this model; leave out"
    )
