"""What a job with ``--zero-bubble-schedule auto`` keeps next to its checkpoints: its decision, and what it measured.

Both files have the facts that they follow from, so that those of another job are recognized.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from megatron.zero_bubble.core.errors import UserError, explaining
from megatron.zero_bubble.core.formats.costs import read_costs_file
from megatron.zero_bubble.core.formats.facts import KEY_FACTS, Facts, differences, facts_from, listed
from megatron.zero_bubble.core.formats.files import json_object, read_file, read_key
from megatron.zero_bubble.planning.codecs import parse, spell
from megatron.zero_bubble.planning.job.changes import DECIDABLE
from megatron.zero_bubble.planning.setup import Setup

COSTS, DECISION = "zero_bubble_costs.json", "zero_bubble_auto.json"
"""The files: what a run has measured, and what it decided."""
_SETUP = "setup"


class KeptDecision(NamedTuple):
    """What a job runs with.

    Attributes:
        adds, drops: flags of Megatron's own that are added, and that are left out.
        facts: what it was decided from; empty in files of older versions.
    """

    setup: Setup
    adds: tuple[str, ...]
    drops: tuple[str, ...]
    facts: Facts


def read_decision(file: Path) -> KeptDecision:
    """Read a decision.

    Raises:
        UserError: the file is none, or decides what is not for ``auto`` to decide.
    """
    with explaining(after="; remove the file to decide again"):
        return read_file(file, "decision of --zero-bubble-schedule auto", _decision_from)


def write_decision(file: Path, decision: KeptDecision) -> list[str]:
    """Write a decision at once, because other ranks may read it; return a remark if the file cannot be written.

    Every rank decides by itself, so that a decision which is not kept is only made again.
    """
    assert not _undecidable(decision), "auto decides only these"
    content = {
        _SETUP: spell(decision.setup, "json"),
        "adds": decision.adds,
        "drops": decision.drops,
        KEY_FACTS: dict(decision.facts),
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(".draft")
        draft.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        draft.replace(file)
    except OSError as error:
        return [f"{file} cannot be written ({error.strerror}), so the next run decides again"]
    return []


class Costs(NamedTuple):
    """Costs that a run has left.

    Attributes:
        digest: of the content of the file.
        names_its_job: whether the file has the facts of its job.
    """

    file: Path
    digest: str
    names_its_job: bool


def costs_in(folders: Sequence[Path | None], facts: Facts) -> tuple[Costs | None, list[str]]:
    """The first costs in these folders that are of this job, and remarks on others."""
    remarks: list[str] = []
    for file in (folder / COSTS for folder in dict.fromkeys(folders) if folder is not None):
        if not file.exists():
            continue
        try:
            theirs = read_costs_file(file).facts
            digest = sha256(file.read_bytes()).hexdigest()[:12]
        except (UserError, OSError) as error:
            remarks.append(unused(file, error))
            continue
        if different := differences(theirs, facts):
            remarks.append(f"{file} is not used, because it is of another job: {listed(different)}")
            continue
        return Costs(file, digest, bool(theirs)), remarks
    return None, remarks


def unused(file: Path, error: object) -> str:
    """Say why costs are not used; most errors about a file name it."""
    return f"costs are not used: {error}" if str(file) in str(error) else f"{file} is not used: {error}"


def _decision_from(text: str) -> KeptDecision:
    content = json_object(text)
    if "flags" in content:  # of an older version
        return KeptDecision(Setup(), (), (), {})
    setup = parse(read_key(content, _SETUP, "an object", lambda value: isinstance(value, dict)), "json")
    adds, drops = (tuple(read_key(content, name, "a list of strings", _are_words)) for name in ("adds", "drops"))
    decision = KeptDecision(setup, adds, drops, facts_from(content))
    if wrong := _undecidable(decision):
        raise UserError(f"it may have only what auto decides; got {wrong[0]}")
    return decision


def _undecidable(decision: KeptDecision) -> list[str]:
    """The flags that are not for ``auto`` to decide."""
    adds = decision.adds
    names = [*adds[:1], *(word for word in adds[1:] if word.startswith("-")), *decision.drops]
    names += [word for word in spell(decision.setup) if word.startswith("--")]
    return [name for name in names if name.partition("=")[0] not in DECIDABLE]


def _are_words(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)
