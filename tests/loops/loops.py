"""One small loop per framework: the calls that it makes of megatron-core, in its order.

Each returns everything that the loop reads on the last pipeline rank, and the models whose weights count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.loops.models import (
    MICROBATCH,
    SEQUENCE,
    VOCABULARY,
    Adapter,
    Released,
    build,
    frozen_up_to,
    optimizer_of,
    packed_params,
    with_adapters,
    with_head,
)


class Pipeline(NamedTuple):
    """What a loop knows of its pipeline.

    Attributes:
        virtual_size: Megatron's virtual pipeline size.
        is_interleaved: whether Megatron needs a multiple of the ranks as the number of microbatches.
        options: fields of the configurations of all models.
    """

    virtual_size: int | None
    is_interleaved: bool
    options: Mapping[str, Any] = MappingProxyType({})

    def build(self, salt: str, edit: Callable[[Any], None] = lambda _chunk: None, **more: Any) -> list[Any]:
        """The chunks of a model on this rank, as ``models.build``."""
        return build(self.virtual_size, salt, edit, **{**self.options, **more})


Loop = Callable[[Pipeline], tuple[list[Any], dict[str, Any]]]
Batch = dict[str, torch.Tensor]


def batches(number: int, seed: int, length: int = SEQUENCE, packs: bool = False) -> list[Batch]:
    """Microbatches of sequences, with a mask and advantages; with ``packs``, one sequence of different documents."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for place in range(number):
        sizes = torch.randint(2, SEQUENCE, (MICROBATCH,), generator=generator).tolist()
        shape = (1, sum(sizes)) if packs else (MICROBATCH, length)
        batch = {
            "tokens": torch.randint(VOCABULARY, (shape[0], shape[1] + 1), generator=generator),
            "mask": (torch.rand(shape, generator=generator) > 0.3).float(),
            "advantages": torch.randn(shape, generator=generator),
            "positions": torch.arange(length).expand(MICROBATCH, -1),
            "number": torch.tensor(place),
        }
        if packs:
            batch["positions"] = torch.cat([torch.arange(size) for size in sizes])[None]
            batch["sizes"] = torch.tensor(sizes)
        made.append(batch)
    return made


def log_probabilities(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Of the next tokens, from logits that the model returns batch first."""
    return torch.log_softmax(logits.float(), -1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def sums(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The sums of values per token over the sequences of a microbatch."""
    if "sizes" not in batch:
        return values.sum(-1)
    return torch.stack([part.sum() for part in values[0].split(batch["sizes"].tolist())])


def passes(
    chunks: Sequence[Any], data: Sequence[Batch], of_loss: Callable[..., Any], tells: bool = False, **how: Any
) -> list[Any]:
    """One call of the forward-backward function, over a list of microbatches; ``tells`` their shapes to our schedules,
    if they are packed.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    import megatron.zero_bubble

    packs, lengths = "sizes" in data[0], [batch["tokens"].shape[1] - 1 for batch in data]

    def forward_step(iterator: Iterator[Batch], model: Any) -> tuple[Any, Any]:
        batch = next(iterator)
        more = {"packed_seq_params": packed_params(batch["sizes"].tolist())} if packs else {}
        return model(batch["tokens"][:, :-1], batch["positions"], None, **more), partial(of_loss, batch)

    iterators: Any = [iter(data) for _ in chunks]
    known = megatron.zero_bubble.shapes(lengths) if tells else nullcontext()
    with known, torch.set_grad_enabled(not how.get("forward_only")):
        reports: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=list(chunks),
            num_microbatches=len(data),
            seq_length=1 if packs else lengths[0],  # as verl says
            micro_batch_size=1 if packs else MICROBATCH,
            **how,
        )
    return reports


def from_last_rank(reports: Sequence[torch.Tensor], data: Sequence[Batch], per: str = "token") -> list[torch.Tensor]:
    """What the last pipeline rank has per token or sequence, on all ranks; frameworks broadcast log-probabilities like
    this.
    """
    from megatron.core import parallel_state

    shapes = [(MICROBATCH,) if per == "sequence" else batch["mask"].shape for batch in data]
    found = [each.clone() for each in reports] or [torch.empty(shape) for shape in shapes]
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    for each in found:
        dist.broadcast(each, last, group=parallel_state.get_pipeline_model_parallel_group())
    return found


def step(optimizer: Any, chunks: Sequence[Any], run: Callable[[], list[Any]]) -> list[Any]:
    """One optimizer step around a training call."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    reports = run()
    worked, _, _ = optimizer.step()
    assert worked
    return reports


def verl(pipeline: Pipeline, packs: bool = False, tells: bool = False) -> tuple[list[Any], dict[str, Any]]:
    """Actor, reference and critic; memory freed between calls, 4, 6 and 3 microbatches, two rollouts."""
    actor, critic = pipeline.build("actor", packs=packs), pipeline.build("critic", with_head, packs=packs)
    reference = pipeline.build("reference", is_trained=False, packs=packs)
    run = partial(passes, tells=tells)
    optimizers, seen = {"actor": optimizer_of(actor), "critic": optimizer_of(critic)}, []

    def scores(batch: Batch, logits: torch.Tensor) -> Any:
        found = log_probabilities(logits, batch["tokens"])
        return torch.tensor(1.0), {"log_probs": found, "of": {"entropy": [found.mean(), None, "nats"]}}

    def values(batch: Batch, output: torch.Tensor) -> Any:
        return torch.tensor(1.0), {"values": output.squeeze(-1)}

    def policy_loss(old: list[torch.Tensor], of_reference: list[torch.Tensor], batch: Batch, logits: Any) -> Any:
        number = int(batch["number"])
        new, mask = log_probabilities(logits, batch["tokens"]), batch["mask"]
        ratio = torch.exp(new - old[number])
        gain = torch.minimum(ratio * batch["advantages"], ratio.clamp(0.8, 1.2) * batch["advantages"])
        loss = (((new - of_reference[number]) * 0.1 - gain) * mask).sum() / mask.sum()
        return loss, [{"actor/pg_loss": loss.detach().item(), "ratios": ratio.detach()}, (mask.sum().int(), None)]

    def value_loss(returns: list[torch.Tensor], batch: Batch, output: torch.Tensor) -> Any:
        loss = ((output.squeeze(-1) - returns[int(batch["number"])]) ** 2 * batch["mask"]).mean()
        return loss, {"critic/vf_loss": loss.detach()}

    for rollout in range(2):
        data = batches(6, rollout, packs=packs)
        with Released(critic), Released(actor, gradients_only=True):
            for chunk in actor:
                chunk.eval()
            old = run(actor, data, scores, forward_only=True)
            of_reference = run(reference, data, scores, forward_only=True)
        with Released(actor):
            critics = run(critic, data, values, forward_only=True)
        seen += [*old, *of_reference, *critics]
        olds, references = ([each["log_probs"] for each in found] for found in (old, of_reference))
        lists = from_last_rank(olds, data), from_last_rank(references, data)
        returns = from_last_rank([each["values"] for each in critics], data)
        for chunk in actor:
            chunk.train()
        for part in (data[:4], data, data[2 if pipeline.is_interleaved else 3 :]):
            seen += step(optimizers["actor"], actor, partial(run, actor, part, partial(policy_loss, *lists)))
        with Released(actor):
            seen += step(optimizers["critic"], critic, partial(run, critic, data, partial(value_loss, returns)))
    return seen, {"actor": actor, "critic": critic}


def slime(
    pipeline: Pipeline, per_token: bool = True, packs: bool = False, tells: bool = False
) -> tuple[list[Any], dict[str, Any]]:
    """Log-probabilities per sample, steps of different numbers of microbatches, and the norm between grads and step."""
    options = {"overlaps": per_token, "calculate_per_token_loss": per_token, "packs": packs}
    model, run = pipeline.build("slime", **options), partial(passes, tells=tells)
    optimizer, seen = optimizer_of(model), []

    def scores(batch: Batch, logits: torch.Tensor) -> Any:
        return torch.empty(0), {"log_probs": list(log_probabilities(logits, batch["tokens"]))}

    def loss(batch: Batch, logits: torch.Tensor) -> Any:
        mask = batch["mask"]
        total = -(log_probabilities(logits, batch["tokens"]) * batch["advantages"] * mask).sum()
        count = mask.sum().int() if per_token else torch.tensor(1, dtype=torch.int)
        return total, count, {"keys": ["loss", "pg"], "values": torch.stack([count, total.detach(), total.detach()])}

    for rollout in range(2):
        numbers = (2, 4) if pipeline.is_interleaved else (3, 5)
        steps = [batches(number, 10 * rollout + number, packs=packs) for number in numbers]
        for data in steps:
            seen += run(model, data, scores, forward_only=True)
        for data in steps:
            for chunk in model:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            reports = run(model, data, loss)
            assert not optimizer.prepare_grads()
            norm = optimizer.get_grad_norm()
            seen += [*reports, {"grad_norm": norm}] if reports else []
            assert optimizer.step_with_ready_grads()
    return seen, {"model": model}


def nemo_rl(pipeline: Pipeline) -> tuple[list[Any], dict[str, Any]]:
    """Sequences padded to another length in every call, evaluation, and a reward model in the same process."""
    policy = pipeline.build("policy", frozen_up_to(LAYERS_OF_FIRST_STAGES))
    reward = pipeline.build("reward", with_head, is_trained=False)
    optimizer, seen = optimizer_of(policy), []

    def scores(batch: Batch, logits: torch.Tensor) -> Any:
        return torch.tensor(0.0), {"logprobs": log_probabilities(logits, batch["tokens"])}

    def rewards(_batch: Batch, output: torch.Tensor) -> Any:
        return torch.tensor(0.0), output[:, -1, 0]

    def loss(batch: Batch, logits: torch.Tensor) -> Any:
        value = -(log_probabilities(logits, batch["tokens"]) * batch["mask"]).sum() / batch["mask"].sum()
        return value, {"metrics": {"loss": value.detach(), "num_valid": int(batch["mask"].sum())}, "rest": ()}

    def nothing(_batch: Batch, logits: torch.Tensor) -> Any:
        return logits.mean(), None

    for number, length in enumerate((SEQUENCE, 2 * SEQUENCE, 4, SEQUENCE)):
        data = batches(4, number, length)
        how = {"decoder_seq_length": length}
        seen += passes(policy, data, scores, forward_only=True, **how)
        seen += passes(reward, data, rewards, forward_only=True, **how)
        seen += step(optimizer, policy, partial(passes, policy, data, loss, **how))
        seen += passes(policy, data[:2], nothing, forward_only=True, first_val_step=True, **how)
    return seen, {"policy": policy}


LAYERS_OF_FIRST_STAGES = 2


def ms_swift(pipeline: Pipeline, packs: bool = False) -> tuple[list[Any], dict[str, Any]]:
    """Adapters on a frozen model, which is its own reference without them; then a reward model is trained."""
    model = pipeline.build("swift", with_adapters, packs=packs)
    reward = pipeline.build("swift reward", with_head, packs=packs)
    optimizers, seen = (optimizer_of(model), optimizer_of(reward)), []

    def scores(batch: Batch, logits: torch.Tensor) -> Any:
        return torch.tensor(0.0), sums(log_probabilities(logits, batch["tokens"]), batch)

    def preference(of_reference: list[torch.Tensor], batch: Batch, logits: torch.Tensor) -> Any:
        own = sums(log_probabilities(logits, batch["tokens"]), batch)
        chosen, rejected = own - of_reference[int(batch["number"])]
        loss = -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected))
        return loss, {"loss": loss.detach(), "rewards": {"chosen": chosen.detach(), "rejected": rejected.detach()}}

    def ranking(batch: Batch, output: torch.Tensor) -> Any:
        chosen, rejected = sums(output.squeeze(-1), batch) if packs else output[:, -1, 0]
        loss = -torch.nn.functional.logsigmoid(chosen - rejected)
        return loss, {"loss": loss.detach()}

    for rollout in range(2):
        data = batches(4, 50 + rollout, packs=packs)
        Adapter.is_on = False
        try:
            found = passes(model, data, scores, forward_only=True)
        finally:
            Adapter.is_on = True
        seen += found
        loss = partial(preference, from_last_rank(found, data, "sequence"))
        for part in (data, data[:2]):
            seen += step(optimizers[0], model, partial(passes, model, part, loss))
        seen += step(optimizers[1], reward, partial(passes, reward, data, ranking))
    return seen, {"model": model, "reward": reward}


def bridge(pipeline: Pipeline) -> tuple[list[Any], dict[str, Any]]:
    """In-batch packing of Megatron-Bridge: a fixed number of microbatches, a loss per token, and evaluation."""
    model = pipeline.build("bridge", packs=True, overlaps=True, calculate_per_token_loss=True)
    optimizer, seen = optimizer_of(model), []

    def loss(batch: Batch, logits: torch.Tensor) -> Any:
        values = log_probabilities(logits, batch["tokens"]) * batch["mask"]
        return -values.sum(), batch["mask"].sum().int(), {"lm loss": torch.stack([-values.sum(), batch["mask"].sum()])}

    for number in range(3):
        seen += step(optimizer, model, partial(passes, model, batches(4, 70 + number, packs=True), loss))
        seen += passes(model, batches(2, 80 + number, packs=True), loss, forward_only=True)
    return seen, {"model": model}


LOOPS: dict[str, Loop] = {
    "verl": verl,
    "slime, loss per token": slime,
    "slime, mean of microbatches": partial(slime, per_token=False),
    "nemo-rl": nemo_rl,
    "ms-swift": ms_swift,
    "verl, packed": partial(verl, packs=True),
    "verl, packed, shapes given": partial(verl, packs=True, tells=True),
    "slime, packed": partial(slime, packs=True),
    "slime, packed, shapes given": partial(slime, packs=True, tells=True),
    "ms-swift, padding-free": partial(ms_swift, packs=True),
    "megatron-bridge, in-batch packing": bridge,
}
