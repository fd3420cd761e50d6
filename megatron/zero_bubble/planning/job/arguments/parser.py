"""The flags of ``scripts/pretrain_gpt.py``: Megatron-LM's names for everything supported, and a few additional flags.

Destinations have the field names of megatron-core's ``TransformerConfig``, ``OptimizerConfig`` and
``DistributedDataParallelConfig``, so that the training loop can pass the values by name. This module does not import
torch, so that a wrong flag is reported at once.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NoReturn

from megatron.zero_bubble.core.errors import UserError, explaining
from megatron.zero_bubble.planning.job.arguments.config_file import config_tokens
from megatron.zero_bubble.planning.job.arguments.estimated import add_estimated
from megatron.zero_bubble.planning.job.arguments.layer_frequency import layer_frequency
from megatron.zero_bubble.planning.job.arguments.model import (
    add_fusion,
    add_model,
    add_moe,
    add_parallel,
    add_precision,
    add_recompute,
)
from megatron.zero_bubble.planning.job.arguments.training import (
    add_checkpoint,
    add_data,
    add_learning_rate,
    add_logging,
    add_measurements,
    add_optimizer,
    add_training,
)
from megatron.zero_bubble.planning.job.flags import add_flags, as_given, taken
from megatron.zero_bubble.planning.job.options import add_options
from megatron.zero_bubble.planning.job.planned import run_of

_MEGATRONS_NAMES = {
    "num_moe_experts": "num_experts",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
}
"""Names that Megatron-LM has for values of flags, before it converts them to those of megatron-core."""

_MISSPELT = 0.91
"""Similarity from which an unknown flag is a known one with a mistake."""


class _Parser(argparse.ArgumentParser):
    """Parser that raises ``UserError`` where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help lists the flags")


def parse(argv: Sequence[str], of_megatron: bool = False) -> argparse.Namespace:
    """Parse the command line, whose flags override those of ``--config FILE``. What our flags ask for is ``run``.

    Args:
        of_megatron: whether the flags are those of ``parse_megatron`` instead of our loop's.

    Raises:
        UserError: unknown flags, values of the wrong type, an unreadable or invalid configuration file, or zero-bubble
            flags that contradict each other.
    """
    first = _Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", default=None)
    config = first.parse_known_args(argv)[0].config
    parser = _megatrons_parser() if of_megatron else build_parser()
    tokens: list[str] = []
    if config is not None:
        tokens = config_tokens(config, argv)
        with explaining(f"configuration file {config}: "):
            parser.parse_args(tokens)
    args = parser.parse_args([*tokens, *argv])
    if of_megatron:
        _name_as_megatron(args)
    args.run = run_of(taken(args), as_given)
    return args


def expanded(argv: Sequence[str]) -> list[str]:
    """Return the flags with those of ``--config FILE`` in the place of it; flags of the command line are the last.

    Raises:
        UserError: an unreadable or invalid configuration file.
    """
    first = _Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", default=None)
    options, others = first.parse_known_args(argv)
    return others if options.config is None else [*config_tokens(options.config, argv), *others]


def misspelt(flags: Sequence[str], similarity: float = _MISSPELT) -> list[tuple[str, str]]:
    """Return those of a job's unknown flags that differ from a known one by a letter or two, each with that one.

    Args:
        similarity: from which they count as that one. Megatron-LM has flags that differ from known ones by whole words.
    """
    from difflib import get_close_matches  # takes a while to import

    known = [name for action in _megatrons_parser()._actions for name in action.option_strings]
    matches = ((flag, get_close_matches(flag, known, n=1, cutoff=similarity)) for flag in flags)
    return [(flag, close[0]) for flag, close in matches if close]


def flags_of_text() -> frozenset[str]:
    """Return the known flags whose value is any text, such as a path."""
    texts = (a for a in _megatrons_parser()._actions if a.type is None and a.choices is None and a.nargs in (None, "+"))
    return frozenset(name for action in texts for name in action.option_strings)


def flags_of(fields: Mapping[str, Any]) -> list[str]:
    """Return the flags of a job that give fields of megatron-core's configurations these values; others have none."""
    words: list[str] = []
    for action in _megatrons_parser()._actions:
        value = fields.get(action.dest)
        given = [] if action.nargs == 0 or value is None else value if isinstance(value, list) else [value]
        if action.option_strings and (given or (value is not None and value == action.const)):
            words += [action.option_strings[0], *map(str, given)]
    return words


def parse_megatron(argv: Sequence[str]) -> tuple[argparse.Namespace, tuple[str, ...]]:
    """Parse the flags of a job that runs Megatron-LM's script, but for ours.

    Values that only Megatron-LM supports, such as its other tokenizers, are accepted unchecked.

    Returns:
        the flags that this program or its rules know, those of the pipeline under Megatron-LM's names as well; and the
        names of all other flags.

    Raises:
        UserError: values of the wrong type, or a word that belongs to no flag.
    """
    parser = _megatrons_parser()
    args, others = parser.parse_known_args(argv)
    if others and (stray := _stray(argv)) is not None:
        raise UserError(
            f"every word must belong to a flag; got {stray[1]!r} after {stray[0]}, which takes fewer; put quotes "
            "around values with spaces, and around the variable or array that holds them"
        )
    _name_as_megatron(args)
    unread = [token.partition("=")[0] for token in others if token.startswith("--")]
    return args, tuple(unread if args.config is None else ["--config", *unread])


def _stray(argv: Sequence[str]) -> tuple[str, str] | None:
    """The first word that belongs to no flag, and the flag with one value or none that stands before it."""
    actions, flag, room = _megatrons_parser()._option_string_actions, "", math.inf
    for word in argv:
        if word.startswith("--"):
            flag, given, _ = word.partition("=")
            nargs = actions[flag].nargs if flag in actions else "*"
            takes = nargs if isinstance(nargs, int) else 1 if nargs in (None, "?") else math.inf
            room = 0 if given and takes < math.inf else takes
        elif (room := room - 1) < 0:
            return flag, word
    return None


def with_megatron_flags(args: argparse.Namespace, adds: Sequence[str], drops: Sequence[str]) -> argparse.Namespace:
    """Return a copy of what ``parse_megatron`` has parsed, with flags of Megatron's own added and others left out.

    Raises:
        UserError: values of the wrong type.
    """
    parser, changed = _megatrons_parser(), copy.copy(args)
    for flag in drops:
        action = parser._option_string_actions[flag]
        setattr(changed, action.dest, parser.get_default(action.dest))
    added, _ = parser.parse_known_args(list(adds), changed)
    _name_as_megatron(added)
    return added


def _name_as_megatron(args: argparse.Namespace) -> None:
    for ours, megatrons in _MEGATRONS_NAMES.items():
        setattr(args, megatrons, getattr(args, ours))
    if args.expert_tensor_parallel_size is None:
        args.expert_tensor_parallel_size = args.tensor_model_parallel_size


@cache
def _megatrons_parser() -> _Parser:
    """The parser of the flags of Megatron-LM's script that are known here, which nothing changes."""
    parser = build_parser()
    for action in parser._actions:
        action.choices = None
        if action.dest == "moe_router_load_balancing_type":
            action.nargs = "+"
    parser.set_defaults(tokenizer_type=None)
    add = parser.add_argument
    add("--context-parallel-size", type=int, default=1)
    add("--use-tp-pp-dp-mapping", action="store_true")
    for flag in ("num-layers-per-virtual-pipeline-stage", "eval-global-batch-size", "eval-micro-batch-size"):
        add(f"--{flag}", type=int)
    add("--train-samples", type=int)
    add("--decrease-batch-size-if-needed", action="store_true")
    for flag in ("num-heads", "head-dim", "state-dim", "num-groups"):
        add(f"--mamba-{flag}", type=int)
    for flag in ("--step-batch-size-schedule", "--hybrid-layer-pattern", "--hybrid-override-pattern", "--yaml-cfg"):
        add(flag)
    add("--moe-layer-freq", type=layer_frequency, default=1)
    for kind in ("", "expert-"):  # without the flag, Megatron sets the only number that works
        add(f"--{kind}tensor-parallel-num-weight-shards", type=int, default=argparse.SUPPRESS)
    add_estimated(parser)
    add_options(parser)
    return parser


def build_parser() -> _Parser:
    """Build the parser with all flags; a test freezes their list."""
    parser = _Parser(
        prog="pretrain_gpt.py",
        description="Pretrain a GPT on megatron-core, with or without a zero-bubble schedule. All flags but "
        "--zero-bubble-*, --config and --metrics-file have Megatron-LM's names and meanings.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file with flags, as in configs/; the command line overrides it"
    )
    parser.set_defaults(context_parallel_size=1, use_tp_pp_dp_mapping=False)  # only jobs of Megatron-LM set them
    for add_group in (
        add_flags,
        add_measurements,
        add_parallel,
        add_model,
        add_moe,
        add_recompute,
        add_fusion,
        add_precision,
        add_training,
        add_optimizer,
        add_learning_rate,
        add_data,
        add_checkpoint,
        add_logging,
    ):
        add_group(parser)
    return parser
