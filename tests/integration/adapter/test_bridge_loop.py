"""A loop that calls the forward-backward function as Megatron-Bridge does: with communicator and process groups, with
another sequence length in each call, and with evaluations between the training steps.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.ranks import RankPool
from tests.helpers.rows import some
from tests.integration.adapter.test_foreign_loop import SEQUENCE, build_chunks, named, samples

LENGTHS, MICROBATCHES = (8, 5, 6), 6


def forward_step(length: int, text: torch.Tensor, model: Any) -> tuple[torch.Tensor, Any]:
    positions = torch.arange(length).expand(2, -1)
    losses = model(text[:, :length], positions, None, labels=text[:, 1 : length + 1])

    def reported(output: torch.Tensor, non_loss_data: bool = False) -> Any:
        if non_loss_data:
            return output.sum().item().hex()
        return output.sum(), torch.tensor(output.numel()), {"loss": output.sum().item().hex()}

    return losses, reported


def train(num_chunks: int) -> tuple[list[Any], dict[str, str]]:
    """Train, evaluate and collect non-loss data for each length; return all results, and the weights' sums by name."""
    from megatron.core import tensor_parallel
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.utils import get_model_config

    tensor_parallel.model_parallel_cuda_manual_seed(7)
    model = build_chunks(virtual_size(num_chunks))
    config, groups = get_model_config(model[0]), ProcessGroupCollection.use_mpu_process_groups()
    config.calculate_per_token_loss = True
    data, results = [samples() for _ in model], []
    for length in LENGTHS:
        run = functools.partial(
            get_forward_backward_func(pp_size=groups.pp.size(), vp_size=virtual_size(num_chunks)),
            forward_step_func=lambda batches, chunk, length=length: forward_step(length, next(batches), chunk),
            data_iterator=data if len(data) > 1 else data[0],
            model=model,
            num_microbatches=MICROBATCHES,
            seq_length=length,
            decoder_seq_length=length,
            micro_batch_size=2,
            adjust_tensor_shapes_fn=None,
            p2p_communicator=P2PCommunicator(pp_group=groups.pp, config=config),
            pg_collection=groups,
        )
        for chunk in model:
            chunk.zero_grad_buffer()
        results.append(run(forward_only=False))
        with torch.no_grad():
            for parameter in (parameter for chunk in model for parameter in chunk.parameters()):
                parameter -= 0.5 * parameter.main_grad
            results.append(run(forward_only=True, first_val_step=True))
            results.append(run(forward_only=True, collect_non_loss_data=True))
    weights = (weight for chunk in model for weight in named(chunk.module))
    return results, {name: weight.detach().double().sum().item().hex() for name, weight in weights}


def virtual_size(num_chunks: int) -> int | None:
    return num_chunks if num_chunks > 1 else None


def initialize(num_chunks: int = 1) -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=virtual_size(num_chunks),
        create_gloo_process_groups=False,
    )


def both(rank: int, schedule: str, num_chunks: int) -> tuple[Any, Any]:
    import megatron.zero_bubble

    initialize()
    stock = train(1)
    megatron.zero_bubble.apply(megatron.zero_bubble.ZeroBubbleConfig(schedule=schedule, fuse_wgrad=False))
    try:
        initialize(num_chunks)
        return stock, train(num_chunks)
    finally:
        megatron.zero_bubble.revert()


RUNS = [("zb-h1", 1), ("interleaved-1f1b", 2), ("zb-v", 2)]


@pytest.mark.parametrize(("schedule", "num_chunks"), some(RUNS, *RUNS[::2]))
def test_a_loop_like_bridges_keeps_its_results(ranks: RankPool, schedule: str, num_chunks: int) -> None:
    """With two stages per rank, they equal those of stock 1F1B with one, from the same weights."""
    first, last = ranks.run(2, both, schedule, num_chunks)
    for which in (0, 1):
        assert first[which][0] == [[]] * 3 * len(LENGTHS)
        assert [len(each) for each in last[which][0]] == [MICROBATCHES] * 3 * len(LENGTHS)
    stock, ours = ((last[which][0], {**first[which][1], **last[which][1]}) for which in (0, 1))
    assert ours == stock
    assert len(set(map(str, stock[0]))) == len(stock[0])
    assert len(stock[1]) == 4 * 12 + 4


def refused(rank: int) -> None:
    """Communicators of other pipelines, and of several models, are refused before any work."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron.zero_bubble.core.errors import UserError
    from megatron.zero_bubble.integration.adapter.versions import check_one_model, check_one_pipeline

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
