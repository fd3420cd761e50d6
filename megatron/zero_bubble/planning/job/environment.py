"""The ``--zero-bubble-*`` flags of a process that has no command line of its own, from its environment.

Every flag is also a variable: ``--zero-bubble-memory-limit 1p`` is ``ZERO_BUBBLE_MEMORY_LIMIT=1p``, and a switch has
the value 1 or 0. Both go through one parser, so they have the same values, checks and messages, which name the flag.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron.zero_bubble.core.errors import UserError, nearest
from megatron.zero_bubble.planning.codecs import variable, words_of_variable
from megatron.zero_bubble.planning.decisions import DECISIONS, REMOVED
from megatron.zero_bubble.planning.job.flags import HELP_ALL, parse_ours
from megatron.zero_bubble.planning.run_options import RunOptions
from megatron.zero_bubble.planning.values import BALANCE, values_of

PREFIX = "ZERO_BUBBLE_"

_STEPS = "a training loop must hand its optimizer to the pipeline"
_APPLY = "leave it out, or call megatron.zero_bubble.apply() in the loop"
_ITERATIONS = "only a training loop of this package or one under the launcher counts iterations and documents"
_LAUNCH = "leave it out, or run a Megatron-LM script with python -m megatron.zero_bubble.launch"
_NEEDS_A_LOOP = {
    **dict.fromkeys(("post_validation", "shard_weights"), (_STEPS, _APPLY)),
    **dict.fromkeys((BALANCE, "trace", "record_costs", "log_bubble"), (_ITERATIONS, _LAUNCH)),
}
"""What only a training loop can provide, by the names of decisions, with the reason and the remedy."""


def flags_in(environment: Mapping[str, str]) -> RunOptions:
    """Parse and check the flags in the variables that begin with ``ZERO_BUBBLE_``.

    An empty value counts as not set. A plan file is read.

    Raises:
        UserError: an unknown variable; a value that the flag does not have; flags that exclude each other or have no
            effect; or a flag whose effect only a training loop can provide.
    """
    by_name = {variable(option): option for option in DECISIONS}
    removed = {_variable(flag): f"--zero-bubble-{flag}" for flag in REMOVED}
    arguments = []
    for name, value in sorted(environment.items()):
        if not name.startswith(PREFIX) or not value:
            continue
        if name in by_name:
            arguments += words_of_variable(by_name[name], value)
        elif name in removed:
            arguments.append(removed[name])
        else:
            raise UserError(_unknown(name))
    run, _ = parse_ours(arguments)
    made = {**values_of(run.setup), **vars(run.observations), BALANCE: run.balance}
    for name, (why, remedy) in _NEEDS_A_LOOP.items():
        if made.get(name):
            given = _variable(name)
            got = environment.get(given) or "a plan file with it"
            raise UserError(f"{given} has no effect by itself, because {why}; got {got}; {remedy}")
    return run


def _variable(flag: str) -> str:
    return PREFIX + flag.replace("-", "_").upper()


def _unknown(name: str) -> str:
    flag = nearest(name.removeprefix(PREFIX), [option.flag for option in DECISIONS])
    meant = "" if flag is None else f"; did you mean {_variable(flag)}?"
    return (
        f"unknown variable {name}{meant}; variables are named like the flags, without --, in capitals, with _ for -; "
        f"{HELP_ALL} of a job lists the flags"
    )
