"""The transformer layers of a stage as graphs: F, B and W of every slot are recorded once, and then only repeated.

A graph works in the memory in which it was recorded, so the microbatches that a stage has under way at the same time
need graphs in different memory: those of their slots (``core.plan.slots``). Embedding, output layer and loss stay
outside; the layers are one node of autograd in the graph of a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Kind, Pass
from megatron.zero_bubble.engine.platforms.graphs import Graph, GraphPool, without_garbage_collection
from megatron.zero_bubble.engine.wgrad.accumulate import GradAccumulator
from megatron.zero_bubble.engine.wgrad.grad_sync import reduces_now
from megatron.zero_bubble.engine.wgrad.graphed import ReplayedGradients
from megatron.zero_bubble.engine.wgrad.store import WgradStore

_OF_DATA_PARALLELISM = f"{DistributedDataParallel._make_forward_pre_hook.__qualname__}."
Key = tuple[int, bool]
"""A slot, and whether its microbatches have a W apart from B."""


class Layers:
    """The transformer layers of a chunk, during one iteration.

    Args:
        chunk: as Megatron has wrapped it.
        block: the module with the layers.
    """

    def __init__(self, chunk: torch.nn.Module, block: Any, accumulate: GradAccumulator) -> None:
        self._chunk, self._accumulate = chunk, accumulate
        self.block = block
        self.run: Callable[..., Any] = block.forward
        self.modules: tuple[Any, ...] = tuple(block.modules())
        self.parameters: tuple[Any, ...] = tuple(p for p in block.parameters() if p.requires_grad)

    def places(self) -> tuple[int, ...]:
        """The addresses of weights and of their gradients."""
        weights = [parameter.data_ptr() for parameter in self.block.parameters()]
        return (*weights, *(parameter.main_grad.data_ptr() for parameter in self.parameters))

    def before_forward(self) -> None:
        """Call the hooks with which data parallelism gathers the weights before they are used."""
        for module in self.modules:
            if module._forward_pre_hooks:
                for hook in tuple(module._forward_pre_hooks.values()):
                    hook(module, ())

    def added(self) -> None:
        """Tell data parallelism, in the last microbatch, that the gradients of the layers are complete."""
        if reduces_now(self._chunk):
            self._accumulate.report(self.parameters)

    def check(self) -> None:
        """Check that recorded layers do what they do without graphs.

        Raises:
            UserError: a graph would leave out the hooks of others, or no gradients are accumulated in ``main_grad``.
        """
        if not all(hasattr(parameter, "main_grad") for parameter in self.parameters):
            raise UserError(
                "CUDA graphs of stages accumulate gradients in the main_grad of megatron-core's "
                f"DistributedDataParallel; got a {type(self._chunk).__name__} without it; wrap the chunk, or set "
                "cuda_graph_impl='none'"
            )
        hooked = [
            type(module).__name__ for module in self.modules if not all(map(is_of_data_parallelism, _hooks_of(module)))
        ]
        hooked += [f"a parameter of shape {tuple(p.shape)}" for p in self.parameters if self._accumulate.is_hooked(p)]
        if hooked:
            raise UserError(
                "a CUDA graph calls no hooks of modules or parameters, except those of data parallelism; got some on "
                f"{', '.join(dict.fromkeys(hooked))}; remove them, or set cuda_graph_impl='none'"
            )


def _hooks_of(module: Any) -> Iterator[Any]:
    for hooks in (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    ):
        yield from hooks.values()


def is_of_data_parallelism(hook: Any) -> bool:
    """Whether a hook of a module gathers its weights before they are used."""
    return str(getattr(hook, "__qualname__", "")).startswith(_OF_DATA_PARALLELISM)


class Arguments:
    """What the layers are called with in a microbatch, apart from the hidden states."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._leaves, self._tree = tree_flatten((args, dict(kwargs)))
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in self._leaves):
            raise UserError(
                "a CUDA graph of a stage returns the gradient of its hidden states only; got another argument of the "
                "layers that requires one; detach it, or set cuda_graph_impl='none'"
            )

    def in_memory_of_their_own(self) -> Arguments:
        """The same, with copies of the tensors."""
        args, kwargs = tree_unflatten([_copied(leaf) for leaf in self._leaves], self._tree)
        return Arguments(args, kwargs)

    def copy(self, other: Arguments) -> None:
        """Copy the tensors of ``other``.

        Raises:
            UserError: something else than the values of tensors differs.
        """
        if self._tree != other._tree or not all(map(_fits, self._leaves, other._leaves)):
            raise UserError(
                "a CUDA graph repeats the layers for microbatches of one shape and with the same options; got "
                f"{other} after {self}; set cuda_graph_impl='none'"
            )
        for mine, given in zip(self._leaves, other._leaves, strict=True):
            if isinstance(mine, torch.Tensor):
                mine.copy_(given)

    def call(self, run: Callable[..., Any]) -> Any:
        args, kwargs = tree_unflatten(self._leaves, self._tree)
        return run(*args, **kwargs)

    def __str__(self) -> str:
        return f"({', '.join(map(_described, self._leaves))})"


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _fits(mine: Any, given: Any) -> bool:
    if isinstance(mine, torch.Tensor):
        return isinstance(given, torch.Tensor) and (mine.shape, mine.dtype) == (given.shape, given.dtype)
    return mine is given or (isinstance(mine, (bool, int, float, str)) and mine == given)


def _described(leaf: Any) -> str:
    return f"{leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else repr(leaf)


class Given(NamedTuple):
    """A call of the layers.

    Attributes:
        x: the hidden states.
    """

    x: torch.Tensor
    others: Arguments


class Slot(NamedTuple):
    """The graphs of one slot, and the tensors in its memory that do not change their place.

    Attributes:
        given: what F reads.
        y, dy, dx: output, its gradient, and that of the input.
        weights: the graph of W; None if B has computed the gradients of the weights.
    """

    given: Given
    y: torch.Tensor
    dy: torch.Tensor
    dx: torch.Tensor
    forward: Graph
    backward: Graph
    weights: Graph | None


class _Replayed(torch.autograd.Function):
    """The layers of a stage in one microbatch."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, block: GraphedBlock, slot: Slot) -> torch.Tensor:
        ctx.block, ctx.slot = block, slot
        slot.given.x.copy_(x)
        slot.forward.replay()
        return slot.y.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        block, slot = ctx.block, ctx.slot
        slot.dy.copy_(grad)
        slot.backward.replay()
        if slot.weights is None:
            block.layers.added()
        else:
            block.store.put(ReplayedGradients(block.layers.parameters, partial(block.run_w, slot.weights)))
        return slot.dx.clone(), None, None


class GraphedBlock:
    """The graphs of the layers of one chunk. Between iterations, it does not refer to the chunk: it ends with it.

    Attributes:
        num_without: iterations so far without graphs.
        has_graphs: whether the layers repeat graphs from now on.
    """

    def __init__(self, store: WgradStore) -> None:
        self.store = store
        self.num_without, self.has_graphs = 0, False
        self._layers: Layers | None = None
        self._given: Given | None = None  # in the last forward without graphs
        self._recorded: dict[Key, Slot] = {}
        self._places: tuple[int, ...] = ()
        self._key_of: Callable[[int], Key] | None = None

    @property
    def layers(self) -> Layers:
        """Those of the running iteration."""
        assert self._layers is not None, "an iteration begins with them"
        return self._layers

    def begin(self, layers: Layers) -> None:
        """Called at the beginning of an iteration."""
        self._layers = layers

    @property
    def is_known(self) -> bool:
        """Whether the layers have run without graphs, so that it is known how they are called."""
        return self._given is not None

    def run_without_graphs(self) -> None:
        """In the iteration that follows, notice how the layers are called."""
        self._key_of = None

    def run_with_graphs(
        self,
        stage: int,
        keys: Sequence[Key],
        new_pool: Callable[[], GraphPool],
        unreduced: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Repeat graphs in the iteration that follows. Nothing is under way yet, so missing ones are recorded now.

        Args:
            keys: what each microbatch runs in.
            unreduced: context in which data parallelism does not reduce gradients.
        """
        assert self._given is not None, "how the layers are called is known from an iteration without graphs"
        self._key_of = keys.__getitem__
        self.layers.check()  # in every iteration, because a replay calls no hooks that are added later, either
        if (places := self.layers.places()) != self._places:
            self._recorded, self._places = {}, places
        missing = sorted(set(keys) - self._recorded.keys())
        if not missing:
            return
        self.layers.before_forward()  # what is gathered already is not gathered in the graph
        for module in self.layers.modules:
            if hasattr(module, "is_first_microbatch"):
                module.is_first_microbatch = False  # TransformerEngine would overwrite the gradients
        with unreduced(), self.store.recorded(), without_garbage_collection():
            for key in missing:
                self._recorded[key] = self._record(stage, key[1], self._given, new_pool())
        self._given = self._recorded[missing[0]].given

    def run_w(self, weights: Graph) -> None:
        """Repeat the graph of W, which accumulates the gradients."""
        weights.replay()
        self.layers.added()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Context around the passes of a training iteration, at whose end the layers are those of Megatron again."""
        block = self.layers.block
        before = vars(block).get("forward")
        block.forward = self._forward
        try:
            yield
        finally:
            if before is None:
                del block.forward
            else:
                block.forward = before
            self._layers = None

    def _forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        running = self.store.running
        assert running is not None, "the layers run in an F"
        given, others = self._received(args, kwargs)
        if self._key_of is None:
            self._given = Given(given.detach(), others)
            return self._run(given, others)
        slot = self._recorded[self._key_of(running.microbatch)]
        slot.given.others.copy(others)
        self.layers.before_forward()
        return _Replayed.apply(given if given.requires_grad else given.detach().requires_grad_(), self, slot)

    def _received(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, Arguments]:
        """The hidden states, and the other arguments; hidden states are passed by name, or come from another stage."""
        block = self.layers.block
        if not block.pre_process:
            return block.input_tensor, Arguments(args, kwargs)
        return kwargs["hidden_states"], Arguments(args, {**kwargs, "hidden_states": None})

    def _run(self, x: torch.Tensor, others: Arguments) -> Any:
        block, run = self.layers.block, self.layers.run
        if block.pre_process:
            return others.call(lambda *args, **kwargs: run(*args, **{**kwargs, "hidden_states": x}))
        before, block.input_tensor = block.input_tensor, x
        try:
            return others.call(run)
        finally:
            block.input_tensor = before

    def _record(self, stage: int, splits: bool, like: Given, pool: GraphPool) -> Slot:
        f, b = Pass(stage, Kind.F, 0), Pass(stage, Kind.B if splits else Kind.BW, 0)
        x, others = torch.zeros_like(like.x).requires_grad_(), like.others.in_memory_of_their_own()

        def forward() -> torch.Tensor:
            with torch.enable_grad(), self.store.defer(f, splits):
                return self._run(x, others)

        forwards, y = pool.capture(forward)
        dy = torch.zeros_like(y)

        def backward() -> torch.Tensor:
            with self.store.defer(b, splits):
                torch.autograd.backward(y, dy)
            assert x.grad is not None, "the layers depend on their hidden states"
            return x.grad

        backwards, dx = pool.capture(backward)
        x.grad = None
        has_w = splits and self.layers.parameters
        weights = pool.capture(lambda: self.store.run(Pass(stage, Kind.W, 0)))[0] if has_w else None
        return Slot(Given(x.detach(), others), y.detach(), dy, dx, forwards, backwards, weights)
