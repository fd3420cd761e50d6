"""Train the small models with experts once, and note what the passes of a rank do, or what refuses them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron.zero_bubble
from megatron.zero_bubble import simulate
from megatron.zero_bubble.core.analysis.memory import most_kept
from megatron.zero_bubble.core.costs.even import even_costs
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.plan import read_plan_file
from megatron.zero_bubble.core.ir import Kind
from tests.helpers import expert_models
from tests.helpers.expert_models import train


def deferred(rank: int, name: str, num_microbatches: int) -> list[int]:
    """Train on two stages with a plan file; return how many weight gradients waited at each W."""
    from megatron.zero_bubble.engine.wgrad.store import WgradStore

    waiting, run = [], WgradStore.run

    def noting(store: Any, *arguments: Any) -> None:
        waiting.append(len(list(store.tensors(arguments[0]))))
        run(store, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WgradStore, "run", noting)
        train(name, num_microbatches, 2, {})
    return waiting


def peaks(rank: int, name: str, num_microbatches: int) -> tuple[float, float]:
    """Train on two stages with a plan file; return the peak of this rank in bytes, as measured at any moment, also
    within a pair, and as planned from what its microbatches take.
    """
    from megatron.core import parallel_state

    from megatron.zero_bubble.engine.measure import memory as measure

    found: list[tuple[float, float]] = []
    held: list[int] = []
    keep = measure._Kept.__init__

    def keeping(kept: Any, alive: Any, storage: Any) -> None:
        keep(kept, alive, storage)
        held.append(alive.num_bytes)

    apply, revert = megatron.zero_bubble.apply, megatron.zero_bubble.revert

    def measuring(config: Any) -> None:
        pipeline = apply(replace(config, measure_memory=True))

        def noting() -> None:
            group = parallel_state.get_pipeline_model_parallel_group()
            memory = pipeline.memory.gather(group)
            schedule = read_plan_file(name).schedule
            planned = most_kept(simulate(schedule, even_costs(schedule.placement), memory), memory)
            assert max(held) >= pipeline.memory.peak
            found.append((max(held), planned[group.rank()]))
            revert()

        patch.setattr(megatron.zero_bubble, "revert", noting)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron.zero_bubble, "apply", measuring)
        patch.setattr(measure._Kept, "__init__", keeping)
        train(name, num_microbatches, 2, {"moe_router_topk": 4})  # all experts, so that microbatches are alike
    return found[0]


def nodes_of_fused_backwards(rank: int, name: str, num_microbatches: int) -> list[tuple[str, list[str]]]:
    """Train on two stages with a plan file; return every fused backward of the rank, and what ran in it: the nodes, in
    which W of the experts and of all other weights, and the send.
    """
    from megatron.core.pipeline_parallel.utils import ScheduleNode

    from megatron.zero_bubble.engine.runtime.transport import Transport
    from megatron.zero_bubble.engine.wgrad.store import WgradStore
    from megatron.zero_bubble.integration.adapter.layered_stage import LayeredStage

    found: list[tuple[str, list[str]]] = []
    alone, backward, run, send = LayeredStage.run_alone, ScheduleNode.backward, WgradStore.run, Transport.send
    experts: set[int] = set()

    def noting(what: str) -> None:
        if found and found[-1][1][-1:] != ["end"]:
            found[-1][1].append(what)

    def noting_passes(stage: Any, work: Any, *arguments: Any) -> Any:
        experts.update(id(p) for name, p in stage._model.named_parameters() if ".experts." in name)
        if work.kind is not Kind.BW:
            return alone(stage, work, *arguments)
        found.append((str(work), []))
        given = alone(stage, work, *arguments)
        noting("end")
        return given

    def noting_nodes(node: Any, *grads: Any) -> Any:
        if node.name != "post_attn":  # the other part of attention until 0.15
            noting({"pre_dispatch_computation": "attn"}.get(node.name, node.name))
        return backward(node, *grads)

    def noting_gradients(store: Any, work: Any, *more: Any) -> None:
        weights = {id(entry.deferred.weight) for entry in store._stored.get(work, ())}
        noting("W of experts" if weights & experts else "W")
        run(store, work, *more)

    def noting_sends(*arguments: Any) -> None:
        noting("send")
        send(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayeredStage, "run_alone", noting_passes)
        patch.setattr(ScheduleNode, "backward", noting_nodes)
        patch.setattr(WgradStore, "run", noting_gradients)
        patch.setattr(Transport, "send", noting_sends)
        train(name, num_microbatches, 2, {"num_layers": 8})
    return found


def sends(rank: int, name: str, num_microbatches: int) -> list[tuple[str, bool]]:
    """Train on two stages with a plan file; return every message that a pair gives to another rank, and whether it was
    sent before the backward of the pair had ended.
    """
    from megatron.core.pipeline_parallel.utils import ScheduleNode

    from megatron.zero_bubble.engine.runtime.transport import Transport
    from megatron.zero_bubble.integration.adapter.layered_stage import LayeredStage

    pairs: list[Any] = [None]
    found: list[tuple[str, bool]] = []
    run_pair, backward, send = LayeredStage.run_pair, ScheduleNode.backward, Transport.send

    def noting_pairs(stage: Any, pair: Any, *arguments: Any) -> Any:
        pairs[:] = [pair, "running"]
        return run_pair(stage, pair, *arguments)

    def noting_ends(node: Any, *grads: Any) -> Any:
        given = backward(node, *grads)
        if node.name == "pre_process":  # the last node of a backward
            pairs[1:] = ["ended"]
        return given

    def noting_sends(transport: Any, message: Any, tensor: Any) -> None:
        if pairs[0] is not None and message.producer in pairs[0].works:
            found.append((str(message.value), pairs[1] == "running"))
        send(transport, message, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayeredStage, "run_pair", noting_pairs)
        patch.setattr(ScheduleNode, "backward", noting_ends)
        patch.setattr(Transport, "send", noting_sends)
        train(name, num_microbatches, 2, {})
    return found


def refusal_of_a_loop(rank: int, name: str) -> str:
    """What a loop gets whose forward step returns no plans."""

    def without_plans(data: Iterator[torch.Tensor], model: Any) -> tuple[Any, Any]:
        raise AssertionError("the loop is refused before its first forward")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_models, "forward_step", without_plans)
        try:
            train(name, 4, 2, {})
        except UserError as error:
            return str(error)
    return ""


def refusal_of_one_expert(rank: int) -> str:
    """What this version says to a single expert per rank; empty if it supports one."""
    from megatron.zero_bubble.integration.adapter.versions import check_layer_plans

    for experts, ranks in ((4, 2), (2, 2)):
        try:
            check_layer_plans(SimpleNamespace(num_moe_experts=experts, expert_model_parallel_size=ranks))
        except UserError as error:
            return f"{experts}: {error}"
    return ""
