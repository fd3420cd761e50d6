"""Check the Python sources in a wheel of TransformerEngine, whose path is the argument; print one line per problem.

The linears must have the names and parameters that ``engine/wgrad/transformer_engine.py`` uses. The queue of delayed
weight gradients and ``backward_dw`` are taken out of the sources and run, with stand-ins for everything around them.
"""

from __future__ import annotations

import ast
import contextlib
import queue
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import torch

from megatron.zero_bubble.engine.wgrad.transformer_engine import SPLIT
from megatron.zero_bubble.integration.patching.transformer_engine import FUSES, LINEARS, OPERATION, PUT

_OPERANDS = {"Linear": 2, "LayerNormLinear": 2, "GroupedLinear": 3}
"""Number of operands in the queue; with a third one, B returns gradients that W fills later."""
_OVERLAPS = ("ub_bulk_wgrad", "ub_bulk_dgrad", "ub_overlap_ag_dgrad")
_OF_BASE = ("fuse_wgrad_accumulation", "wgrad_accumulation_and_reduce_hooks", "wgrad_store")


class _Sources:
    """The modules of a wheel, parsed."""

    def __init__(self, wheel: Path) -> None:
        with ZipFile(wheel) as archive:
            named = {name: archive.read(name).decode() for name in archive.namelist() if name.endswith(".py")}
        self._modules = {name.removesuffix(".py").replace("/", "."): ast.parse(text) for name, text in named.items()}

    def find(self, module: str, name: str) -> ast.ClassDef:
        """A class of a module, which must exist."""
        for node in self._modules[module].body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return node
        raise ValueError(f"{module} has no class {name}")

    def calls(self, module: str, method: str) -> Iterator[ast.Call]:
        """The calls of ``....method(...)`` in a module."""
        for node in ast.walk(self._modules[module]):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(f".{method}"):
                yield node


def problems(wheel: Path) -> Iterator[str]:
    """What the split of weight gradients misses in a wheel."""
    sources = _Sources(wheel)
    if _release(wheel) >= FUSES:
        yield from _problems_of_operation(sources)
    base = sources.find("transformer_engine.pytorch.module.base", "TransformerEngineBaseModule")
    yield from _problems_of_queue(_made(sources.find(PUT.module, "WeightGradStore")))
    for seam in (PUT, *LINEARS):
        class_name, _, method = seam.name.partition(".")
        node = sources.find(seam.module, class_name)
        accepted = _parameters(node, method)
        missing = [name for name in seam.parameters if name not in accepted]
        if missing:
            yield f"{seam.name} takes no {', '.join(missing)}"
    for seam, class_name in zip(LINEARS, SPLIT, strict=True):
        node = sources.find(seam.module, class_name)
        assigned = _assigned(node) | _assigned(base)
        wanted = _OF_BASE if class_name == "GroupedLinear" else (*_OF_BASE, *_OVERLAPS)
        yield from (f"{class_name} has no attribute {name}" for name in wanted if name not in assigned)
        if "skip_backward_post_hook" not in {name.attr for name in ast.walk(node) if isinstance(name, ast.Attribute)}:
            yield f"{class_name} does not mark the parameters whose hooks wait for W"
        puts = [call.args[0] for call in sources.calls(seam.module, "wgrad_store.put")]
        lengths = {len(operands.elts) if isinstance(operands, ast.List) else 0 for operands in puts}
        if lengths != {_OPERANDS[class_name]}:
            yield f"{class_name} puts {lengths} operands into its queue instead of {_OPERANDS[class_name]}"
        for is_fused in (False, True):
            yield from _problems_of_w(class_name, _made(base), _made(node), is_fused)


def _release(wheel: Path) -> tuple[int, ...]:
    return tuple(map(int, wheel.name.split("-")[1].split(".")[:2]))


def _problems_of_operation(sources: _Sources) -> Iterator[str]:
    """``backward_dw`` of the fused grouped linear must run the oldest entry, and leave the bias alone."""
    node = sources.find(OPERATION.module, OPERATION.name.partition(".")[0])
    missing = set(OPERATION.parameters) - _parameters(node, "__init__")
    if missing:
        yield f"the fused {OPERATION.name} takes no {', '.join(sorted(missing))}"
    puts = [call.args[0] for call in sources.calls(OPERATION.module, "wgrad_store.put")]
    if not puts or any(not isinstance(operands, ast.List) or len(operands.elts) != 3 for operands in puts):
        yield "the fused grouped linear does not put 3 operands into its queue"
    for accumulates in (False, True):
        operation: Any = _made(node)()
        store = SimpleNamespace(delay_wgrad_compute=lambda: True, context=queue.Queue())
        grads = [torch.full((2, 3), number) for number in (1.0, 2.0)]
        for grad in grads:
            store.context.put([[[], [], [grad]], lambda *_: None])

        def pop(entries: Any = store.context) -> tuple[None, Any]:
            operands, run = entries.get()
            return run(*operands), operands

        store.pop = pop
        weight, bias = torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(2))
        vars(operation).update(
            wgrad_store=store,
            weight0=weight,
            bias0=bias,
            num_groups=1,
            single_grouped_weight=False,
            _accumulate_into_main_grad=accumulates,
            wgrad_accumulation_and_reduce_hooks=[],
        )
        operation.backward_dw()
        is_right = (
            weight.grad is None if accumulates else weight.grad is not None and torch.equal(weight.grad, grads[0])
        )
        if not is_right or bias.grad is not None or store.context.qsize() != 1:
            yield "backward_dw of the fused grouped linear does not run the oldest W alone"


def _parameters(node: ast.ClassDef, method: str) -> set[str]:
    (function,) = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == method]
    return {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}


def _assigned(node: ast.ClassDef) -> set[str]:
    """The attributes of ``self`` that a class assigns."""
    targets = (target for part in ast.walk(node) if isinstance(part, ast.Assign) for target in part.targets)
    annotated = (part.target for part in ast.walk(node) if isinstance(part, ast.AnnAssign))
    both = (target for target in (*targets, *annotated) if isinstance(target, ast.Attribute))
    return {target.attr for target in both if isinstance(target.value, ast.Name) and target.value.id == "self"}


_RUN = ("backward_dw", "need_backward_dw", "_trigger_wgrad_accumulation_and_reduce_hooks")


def _made(node: ast.ClassDef) -> type:
    """The class, without bases, and of a module only the methods that W runs."""
    is_queue = node.name == "WeightGradStore"
    methods = [part for part in node.body if isinstance(part, ast.FunctionDef) and (is_queue or part.name in _RUN)]
    for function in methods:
        function.decorator_list, function.returns = [], None
        for argument in (*function.args.args, *function.args.kwonlyargs):
            argument.annotation = None
    body: list[ast.stmt] = [*methods, ast.Pass()]
    made = ast.ClassDef(node.name, [], [], body, [], **_NO_TYPES)
    cuda = SimpleNamespace(nvtx=SimpleNamespace(range=contextlib.nullcontext))
    names: dict[str, Any] = {
        "torch": SimpleNamespace(cuda=cuda, distributed=torch.distributed),
        "queue": queue,
        "noop_cat": lambda tensors: tensors[0],
        "clear_tensor_data": lambda *_: None,
        "get_nvtx_range_context": contextlib.nullcontext,
    }
    exec(compile(ast.fix_missing_locations(ast.Module([made], [])), node.name, "exec"), names)
    return names[node.name]


_NO_TYPES: dict[str, Any] = {"type_params": []} if sys.version_info >= (3, 12) else {}


def _problems_of_queue(made: Any) -> Iterator[str]:
    """The queue must be first in, first out, and keep the list of operands itself."""
    store, ran = made(True, False), []
    entries = [[number, number + 1] for number in range(3)]
    for entry in entries:
        store.put(entry, lambda *operands: ran.append(operands))
    if store.context.queue[0][0] is not entries[0]:
        yield "the queue does not keep the operands as the first item of an entry"
    popped = [store.pop()[1] for _ in entries]
    if [id(entry) for entry in popped] != [id(entry) for entry in entries] or ran != [tuple(e) for e in entries]:
        yield f"W passes run in the order {ran}, not in that of B"
    store.disable_delay_wgrad_compute()
    off = store.delay_wgrad_compute()
    store.enable_delay_wgrad_compute()
    if off or not store.delay_wgrad_compute():
        yield "the delay cannot be switched off and on"
    if not store.context.empty():
        yield "entries are left in the queue"


def _problems_of_w(class_name: str, base: type, own: type, is_fused: bool) -> Iterator[str]:
    """``backward_dw`` must run the oldest entry, leave a bias that has a gradient alone, and then call the hooks."""
    num = 2 if class_name == "GroupedLinear" else 1
    numbers = [str(i) for i in range(num)] if num > 1 else [""]
    module: Any = type(class_name, (own, base), {})()
    for number in numbers:
        setattr(module, f"weight{number}", torch.nn.Parameter(torch.zeros(2, 3)))
        setattr(module, f"bias{number}", torch.nn.Parameter(torch.zeros(2)))
    weights, biases = ([getattr(module, f"{kind}{n}") for n in numbers] for kind in ("weight", "bias"))
    events: list[str] = []
    entries = [_entry(number, num, events) for number in (1.0, 2.0)]
    store = SimpleNamespace(delay_wgrad_compute=lambda: True, context=queue.Queue())
    for entry in entries:
        store.context.put(entry)

    def pop() -> tuple[Any, Any]:
        operands, run = store.context.get()
        return run(), operands

    store.pop = pop
    vars(module).update(
        wgrad_store=store,
        fuse_wgrad_accumulation=is_fused,
        use_bias=True,
        bias_names=[f"bias{n}" for n in numbers],
        num_gemms=num,
        single_grouped_weight=False,
        use_grouped_tensor=False,
        _get_weight_tensors=lambda: weights,
        wgrad_accumulation_and_reduce_hooks=[lambda: events.append("hook")],
    )
    kept = torch.full((2,), 7.0)
    biases[0].grad = kept
    stand_in = torch.zeros(2, 3)
    for weight in weights if is_fused else ():
        weight.grad = stand_in
    module.backward_dw()
    name = f"backward_dw of {class_name}{' with fused accumulation' if is_fused else ''}"
    if events != ["W 1.0", "hook"]:
        yield f"{name} does not run the oldest W and then the hooks, but {events}"
    if biases[0].grad is not kept:
        yield f"{name} changes a bias that has a gradient"
    if any(bias.grad is None for bias in biases[1:]):
        yield f"{name} leaves a bias without a gradient"
    for weight in weights:
        right = weight.grad is stand_in if is_fused else weight.grad is not None and bool((weight.grad == 1.0).all())
        if not right:
            yield f"{name} leaves a weight with another gradient"


def _entry(number: float, num: int, events: list[str]) -> list[Any]:
    grads, biases = ([torch.full(shape, number)] * num for shape in ((2, 3), (2,)))

    def run() -> Any:
        events.append(f"W {number}")
        return (None, biases, None) if num > 1 else (grads[0], biases[0])

    return [[None, None, grads], run]


def main(wheel: Path) -> int:
    """Print what a wheel misses; return 1 if it misses anything."""
    version = wheel.name.split("-")[1]
    found = list(problems(wheel))
    for problem in found:
        print(f"FAILED  TransformerEngine {version}: {problem}")
    if not found:
        print(f"ok      TransformerEngine {version}: {len(SPLIT)} linears, their queue, and backward_dw as expected")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
