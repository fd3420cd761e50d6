"""Tables of flags, read off the argument parsers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable

from megatron.zero_bubble.__main__ import parser as command_line
from megatron.zero_bubble.planning.decision import TIERS
from megatron.zero_bubble.planning.decisions import DECISIONS
from megatron.zero_bubble.planning.job.arguments.parser import build_parser
from megatron.zero_bubble.planning.job.flags import add_flags, full_help
from site_parts.markdown import code, table

_OURS = "zero bubble"
_HELP_ALL = "zero_bubble_help_all"


def ours() -> str:
    """The flags of zero-bubble training, one table per tier."""
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    full_help(parser)
    actions = {action.dest: action for action in parser._actions}
    parts = []
    for tier, text in TIERS.items():
        own = [actions[option.dest] for option in DECISIONS if option.tier == tier]
        own += [actions[_HELP_ALL]] if tier == "core" else []
        parts.append(f"## {tier.capitalize()}\n\n{text}\n\n{_table(own)}")
    return "\n\n".join(parts)


def of_command() -> str:
    """What every verb of ``zero-bubble`` takes, a section each."""
    return "\n\n".join(f"## zero-bubble {name}\n\n{_table(verb._actions)}" for name, verb in verbs().items())


def of_verbs() -> str:
    """Every verb with its one line."""
    rows = [(code(f"zero-bubble {choice.dest}"), choice.help or "") for choice in _subcommands()._choices_actions]
    return table(("command", "does"), rows)


def of_training() -> str:
    """The other flags of scripts/pretrain_gpt.py, one table per group."""
    parser = build_parser()
    parts = []
    for group in parser._action_groups:
        if group.title != _OURS and group._group_actions:
            parts.append(f"## {(group.title or '').capitalize()}\n\n{_table(group._group_actions)}")
    return "\n\n".join(parts)


def verbs() -> dict[str, argparse.ArgumentParser]:
    """The parsers of ``zero-bubble``'s verbs."""
    return dict(_subcommands().choices)


def _subcommands() -> argparse._SubParsersAction:
    return next(a for a in command_line()._actions if isinstance(a, argparse._SubParsersAction))


def _table(actions: Iterable[argparse.Action]) -> str:
    rows = []
    for action in actions:
        if isinstance(action, argparse._HelpAction):
            continue
        names = action.option_strings or [str(action.metavar or action.dest)]
        rows.append((", ".join(map(code, names)), code(_value(action)), _text(action)))
    return table(("flag", "value", "meaning"), rows) if rows else "No flags."


def _value(action: argparse.Action) -> str:
    """What follows the flag: its choices, its placeholder, or its type."""
    if action.nargs == 0 or not action.option_strings:
        return ""
    if action.choices:
        return ", ".join(map(str, action.choices))
    if action.metavar:
        return " ".join(action.metavar) if isinstance(action.metavar, tuple) else action.metavar
    return getattr(action.type, "__name__", "text")


def _text(action: argparse.Action) -> str:
    """The help, with the default where the help does not state it."""
    text = ((action.help or "") % vars(action)).replace("*", r"\*")  # an asterisk would begin emphasis
    shown = action.default not in (None, False, True, [], argparse.SUPPRESS) and "default" not in text
    return f"{text}{'; ' * bool(text)}default: {action.default}" if shown else text


PARTS: dict[str, Callable[[], str]] = {
    "flags": ours,
    "flags-training": of_training,
    "verbs": of_verbs,
    "flags-command": of_command,
}
