"""Flags for costs, and the figures they give: from flags, a costs file or a model's configuration."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import NamedTuple

from megatron.zero_bubble.cli.links import add_links, linked
from megatron.zero_bubble.cli.machine import ASSUMED
from megatron.zero_bubble.cli.model_config import read_model
from megatron.zero_bubble.cli.shards import notes_on_replicas
from megatron.zero_bubble.core.costs import PassMemory
from megatron.zero_bubble.core.costs.devices import DEVICES
from megatron.zero_bubble.core.costs.estimate import layer_costs
from megatron.zero_bubble.core.costs.predictions import ASSUMED as PREDICTIONS
from megatron.zero_bubble.core.costs.predictions import with_predictions
from megatron.zero_bubble.core.costs.static import ParameterBytes
from megatron.zero_bubble.core.costs.terms import BY_KEY, MEMORY, TIMES
from megatron.zero_bubble.core.costs.units import checked_figure, refuse_huge, refuse_no_time
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.costs import CostsFile, read_costs_file
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.core.ir.sizes import check_size
from megatron.zero_bubble.planning.figures import Figures, TensorModel, measured
from megatron.zero_bubble.planning.setup import BY_COST
from megatron.zero_bubble.planning.weights import ModelWeights


class _Flag(NamedTuple):
    """The flag of a term of costs: its name, placeholder and help."""

    name: str
    metavar: str
    help: str


_FIGURES = {
    "forward_ms": _Flag("--forward-ms", "F", "time of a microbatch's forward (F) {times}"),
    "backward_ms": _Flag("--backward-ms", "B", "time of a microbatch's input gradient (B) {times}"),
    "wgrad_ms": _Flag("--wgrad-ms", "W", "time of a microbatch's weight gradient (W) {times}"),
    "attention": _Flag(
        "--attention-share",
        "A",
        "share of F that attention takes, from 0 to 1, which only sequence slices need; it takes twice as long in B "
        "(default: 0); only with --forward-ms, --backward-ms and --wgrad-ms",
    ),
    "comm_ms": _Flag("--comm-ms", "C", "transfer time between two ranks, in ms (default: 0)"),
    "message_ms": _Flag(
        "--message-ms",
        "T",
        "time that a message takes from the passes of its sender, and from those of its receiver, in ms (default: that "
        "of --costs, or 0)",
    ),
    "activation": _Flag(
        "--activation-memory",
        "A",
        "memory of a microbatch on one rank from F to B, in bytes (default: that of --costs; without either, memory is "
        "counted in microbatches); not with --config",
    ),
    "wgrad": _Flag(
        "--wgrad-memory",
        "G",
        "memory of a microbatch on one rank from B to W, in the same unit (default: that of --activation-memory); not "
        "with --config",
    ),
}
"""The flags of terms, by key."""
_OVERRIDES = ("message_ms", *MEMORY)
"""Those whose flags go before a costs file."""
_BYTES = ParameterBytes(2, 4, 12)
"""Bytes per parameter of weights, gradients and optimizer: bf16 with fp32 gradients and Adam."""


def add_figures(verb: argparse.ArgumentParser, or_file: str = "") -> None:
    """Add the flags for sizes and costs; ``or_file`` names another flag that gives the sizes, if the verb has one."""
    sizes = f"required without --config{or_file and f' or {or_file}'}"
    times = "on one rank, in ms; required without --costs or --config"
    verb.add_argument("--num-ranks", type=int, metavar="P", help=f"number of pipeline ranks; {sizes}")
    verb.add_argument("--num-microbatches", type=int, metavar="M", help=f"microbatches per iteration; {sizes}")
    for flag in _FIGURES.values():
        verb.add_argument(flag.name, type=float, metavar=flag.metavar, help=flag.help.format(times=times))
    verb.add_argument(
        "--costs",
        metavar="FILE",
        help="costs file (JSON), instead of --forward-ms, --backward-ms, --wgrad-ms and --comm-ms; --activation-memory "
        "and --wgrad-memory override its memory",
    )
    verb.add_argument(
        "--config",
        metavar="FILE",
        help="estimate times and memory from a model's training configuration (see configs/)",
    )
    verb.add_argument("--gpu", choices=tuple(DEVICES), help=f"GPU to estimate for, with --config (default: {ASSUMED})")
    verb.add_argument(
        "--no-flash-attention",
        action="store_true",
        help="estimate attention without flash kernels, which stores its scores; with --config",
    )
    add_links(verb)
    verb.add_argument(
        "--gpus-per-node",
        type=int,
        metavar="G",
        help="GPUs of a node, for the all-to-alls of experts, with --config (default: those with fast links)",
    )


def figures(options: argparse.Namespace, num_ranks: int | None = None, num_microbatches: int | None = None) -> Figures:
    """Figures for ``options``; ``num_ranks`` and ``num_microbatches`` of a schedule file override those of the flags.

    Raises:
        UserError: when figures are missing, given twice, or invalid.
    """
    for key in ("comm_ms", "message_ms"):
        if (ms := _given(options, key)) is not None:
            checked_figure(_FIGURES[key].name, ms)
    found = _without_messages(options, num_ranks, num_microbatches)
    message_ms = _given(options, "message_ms")
    return found if message_ms is None else found.with_messages(message_ms)


def _without_messages(options: argparse.Namespace, num_ranks: int | None, num_microbatches: int | None) -> Figures:
    """The figures; ``message_ms`` is that of a costs file."""
    num_ranks = options.num_ranks if num_ranks is None else num_ranks
    num_microbatches = options.num_microbatches if num_microbatches is None else num_microbatches
    for name, count in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches)):
        if count is not None and count < 1:
            raise UserError(f"{name} must be 1 or more; got {count}")
    check_size(num_ranks or 1, num_microbatches or 1)
    if options.config is not None:
        return _of_model(options, num_ranks, num_microbatches)
    of_models = ("--gpu", "--no-flash-attention", "--link-bandwidth", "--network-bandwidth", "--gpus-per-node")
    for flag in of_models:
        if getattr(options, flag[2:].replace("-", "_"), None) not in (None, False):
            raise UserError(f"{flag} requires --config; give --config as well or leave {flag} out")
    for name, count in (("num-ranks", num_ranks), ("num-microbatches", num_microbatches)):
        if count is None:
            raise UserError(
                f"--{name} is required without --config"
                f"{' or --schedule-file' if hasattr(options, 'schedule_file') else ''}; it is missing"
            )
    sizes = num_ranks, num_microbatches
    return _of_file(options, *sizes) if options.costs is not None else _of_flags(options, *sizes)


def _of_flags(options: argparse.Namespace, num_ranks: int, num_microbatches: int) -> Figures:
    """Figures like those of a costs file with one number for each flag."""
    given = {key: _given(options, key) for key in _FIGURES if key not in _OVERRIDES}
    for name in TIMES:
        if given[name] is None:
            raise UserError(f"{_FIGURES[name].name} is required without --costs or --config; it is missing")
    refuse_huge(**given)
    own = {key: BY_KEY[key].checked(figure, _FIGURES[key].name) for key, figure in given.items() if figure is not None}
    refuse_no_time(*(own[name] for name in TIMES))
    return measured(CostsFile(own), num_ranks, num_microbatches, _memory(options))


def _of_file(options: argparse.Namespace, num_ranks: int, num_microbatches: int) -> Figures:
    """Read times from the file, and memory from the flags, else from the file, else use the defaults."""
    _refuse(options, (key for key in _FIGURES if key not in _OVERRIDES), "--costs gives the times of all passes")
    if getattr(options, "layout", None) == BY_COST:
        _refuse(options, MEMORY, f"with --layout {BY_COST}, --costs gives the memory of all layers")
    return measured(read_costs_file(options.costs), num_ranks, num_microbatches, _memory(options))


def _of_model(options: argparse.Namespace, num_ranks: int | None, num_microbatches: int | None) -> Figures:
    """Estimate figures from a model's shapes, with the configuration's sizes unless others are given."""
    if options.costs is not None:
        raise UserError("--config estimates times and memory; leave out --costs")
    _refuse(options, (key for key in _FIGURES if key != "message_ms"), "--config estimates times and memory")
    device = linked(options, DEVICES[options.gpu or ASSUMED])
    by_cost = getattr(options, "layout", None) == BY_COST
    model, microbatches, assumed, division, facts, predictions = read_model(
        options.config, num_ranks, not options.no_flash_attention, by_cost, num_microbatches
    )
    count = microbatches if num_microbatches is None else num_microbatches
    of_replicas = tuple(notes_on_replicas(options, model, count, _BYTES))
    attention = "uses flash kernels" if model.flash else "stores its scores"
    layers = ", ".join(map(str, model.layers))

    notes = [
        f"Estimated from the shapes in {options.config}, not measured; the costs file of a run is more accurate.",
        f"{device}.",
        f"Attention {attention}, recompute {model.recompute}, tensor parallel {model.tensor_parallel}.",
        *([] if by_cost else [f"Layers by rank: {layers}."]),
        *model.assumed(device),
        *of_replicas,
    ]
    if predictions:
        notes.append(PREDICTIONS)
    weights = ModelWeights(model, division, _BYTES, predictions=predictions)
    of_layers = with_predictions(layer_costs(model, device), model, device, predictions)
    return Figures(
        len(model.layers),
        count,
        lambda placement: of_layers.on(division.parts(placement)),
        memory_given=True,
        message_bytes=model.message_bytes,
        most_layers=max(model.layers),
        weights=weights,
        notes=(*notes, *assumed),
        sequence=model.sequence,
        layers=of_layers,
        tensor=TensorModel(weights, device, count) if model.is_divisible and not predictions else None,
        division=division,
        facts={**facts, "gpu": device.name},
    )


def _given(options: argparse.Namespace, key: str) -> float | None:
    """The value of the flag of a term."""
    value: float | None = getattr(options, _FIGURES[key].name[2:].replace("-", "_"))
    return value


def _memory(options: argparse.Namespace) -> Callable[[Placement], PassMemory] | None:
    """The memory that flags give, one figure for every rank; None without these flags."""
    activation, wgrad = (_given(options, key) for key in MEMORY)
    if activation is None and wgrad is None:
        return None
    return lambda placement: PassMemory.uniform(placement, 1.0 if activation is None else activation, wgrad)


def _refuse(options: argparse.Namespace, keys: Iterable[str], why: str) -> None:
    for key in keys:
        if _given(options, key) is not None:
            raise UserError(f"{why}; leave out {_FIGURES[key].name}")
