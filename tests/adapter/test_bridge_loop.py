"""A loop that calls the forward-backward function as Megatron-Bridge does: with communicator and process groups, with
another sequence length in each call, and with evaluations between the training steps.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.adapter.test_foreign_loop import MICROBATCHES, SEQUENCE, build_model, samples
from tests.helpers.ranks import RankPool

LENGTHS = (8, 5, 6)


def forward_step(length: int, text: torch.Tensor, model: Any) -> tuple[torch.Tensor, Any]:
    positions = torch.arange(length).expand(2, -1)
    losses = model(text[:, :length], positions, None, labels=text[:, 1 : length + 1])

    def reported(output: torch.Tensor, non_loss_data: bool = False) -> Any:
        if non_loss_data:
            return output.sum().item().hex()
        return output.sum(), torch.tensor(output.numel()), {"loss": output.sum().item().hex()}

    return losses, reported


def train() -> tuple[list[Any], list[str]]:
    """Train, evaluate and collect non-loss data for each length; return all results and the sums of the weights."""
    from megatron.core import tensor_parallel
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.utils import get_model_config

    tensor_parallel.model_parallel_cuda_manual_seed(7)
    torch.manual_seed(7)
    model = build_model()
    config, groups = get_model_config(model), ProcessGroupCollection.use_mpu_process_groups()
    config.calculate_per_token_loss = True
    data, results = samples(), []
    for length in LENGTHS:
        run = functools.partial(
            get_forward_backward_func(pp_size=groups.pp.size(), vp_size=None),
            forward_step_func=lambda batches, chunk, length=length: forward_step(length, next(batches), chunk),
            data_iterator=data,
            model=[model],
            num_microbatches=MICROBATCHES,
            seq_length=length,
            decoder_seq_length=length,
            micro_batch_size=2,
            adjust_tensor_shapes_fn=None,
            p2p_communicator=P2PCommunicator(pp_group=groups.pp, config=config),
            pg_collection=groups,
        )
        model.zero_grad_buffer()
        results.append(run(forward_only=False))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.5 * parameter.main_grad
            results.append(run(forward_only=True, first_val_step=True))
            results.append(run(forward_only=True, collect_non_loss_data=True))
    return results, [parameter.detach().double().sum().item().hex() for parameter in model.parameters()]


def initialize() -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, create_gloo_process_groups=False)


def both(rank: int, schedule: str) -> Any:
    import megatron.zero_bubble

    initialize()
    stock = train()
    megatron.zero_bubble.apply(megatron.zero_bubble.ZeroBubbleConfig(schedule=schedule, fuse_wgrad=False))
    try:
        ours = train()
    finally:
        megatron.zero_bubble.revert()
    assert ours == stock
    return stock[0]


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2"])
def test_a_loop_like_bridges_keeps_its_results(ranks: RankPool, schedule: str) -> None:
    first, last = ranks.run(2, both, schedule)
    assert first == [[]] * 3 * len(LENGTHS)
    assert [len(each) for each in last] == [MICROBATCHES] * 3 * len(LENGTHS)
    assert len(set(map(str, last))) == len(last)


def refused(rank: int) -> None:
    """Communicators of other pipelines, and of several models, are refused before any work."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron.zero_bubble.adapter.versions import check_one_model, check_one_pipeline
    from megatron.zero_bubble.errors import UserError

    class OfSeveral(P2PCommunicator):
        """As communicators between several models are, a class of its own."""

    initialize()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    config = SimpleNamespace(virtual_pipeline_model_parallel_size=None)
    alone = torch.distributed.new_group([rank], use_local_synchronization=True)
    check_one_model(P2PCommunicator(groups.pp, config), groups)
    with pytest.raises(UserError, match="got a p2p_communicator of type OfSeveral, which is for several models"):
        check_one_model(OfSeveral(groups.pp, config), groups)
    with pytest.raises(UserError, match=rf"got a p2p_communicator of ranks \[{rank}\] and .* ranks \[0, 1\]; pass"):
        check_one_pipeline(P2PCommunicator(alone, config), groups)


def test_other_communicators_are_refused(ranks: RankPool) -> None:
    ranks.run(2, refused)


assert max(LENGTHS) == SEQUENCE, "the model of the foreign loop has positions for its own sequences"
