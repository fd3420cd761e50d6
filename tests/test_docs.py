"""The documentation: generated parts are up to date, nothing is missing from it, no link is dead."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.zero_bubble.__main__ import parser as command_line
from megatron.zero_bubble.integration.megatron_lm import fork_flags
from megatron.zero_bubble.planning.decisions import DECISIONS, REMOVED
from megatron.zero_bubble.planning.exclusions import EXCLUSIONS, OPTIONS
from megatron.zero_bubble.planning.job.arguments.parser import build_parser
from megatron.zero_bubble.planning.job.effects import EFFECTS
from megatron.zero_bubble.planning.job.flags import add_flags, as_given
from megatron.zero_bubble.planning.job.settled import settle_options
from megatron.zero_bubble.planning.ranges import RANGES
from megatron.zero_bubble.planning.run_options import RunOptions
from megatron.zero_bubble.planning.setup import Named, Setup
from site_parts import models, refusals

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md", *PAGES]
FLAGS = ("flags", "command-flags", "pretrain-flags")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^(```|    ).*?(^```$|\n)", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as Markdown's ``toc`` and code hosts make them."""
    heads = re.findall(r"^#+ +(.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_relative_link_is_dead(text: Path) -> None:
    for link in LINK.findall(FENCED.sub("", text.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (text.parent / name).resolve() if name else text
        assert target.exists(), f"{text.name}: {link}"
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), f"{text.name}: {link}"


def test_every_page_and_picture_is_used() -> None:
    """In the navigation, or shown on a page or in the README."""
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in PAGES if f": {page.relative_to(ROOT / 'docs')}\n" not in navigation] == []
    shown = "".join(text.read_text() for text in TEXTS)
    pictures = [path.name for suffix in ("svg", "png", "webp") for path in (ROOT / "docs").glob(f"*.{suffix}")]
    assert [name for name in pictures if name not in shown] == []


def test_generated_parts_are_up_to_date() -> None:
    command = [sys.executable, "scripts/generate_docs.py", "--check"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(["scripts", *sys.path])}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"run scripts/generate_docs.py: {result.stdout}{result.stderr}"


def all_flags(parser: argparse.ArgumentParser) -> set[str]:
    found = {flag for action in parser._actions for flag in action.option_strings}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {flag for verb in action.choices.values() for flag in all_flags(verb)}
    return found - {"-h", "--help", "--version"} - {f"--zero-bubble-{flag}" for flag in REMOVED}


def test_every_flag_is_documented() -> None:
    page = "".join((ROOT / f"docs/{name}.md").read_text() for name in FLAGS)
    ours = argparse.ArgumentParser()
    add_flags(ours)
    retired = {f"--{no}zero-bubble-{row.flag}" for row in DECISIONS if row.tier == "retired" for no in ("", "no-")}
    for parser in (ours, command_line(), build_parser()):
        assert [flag for flag in sorted(all_flags(parser) - retired) if f"`{flag}`" not in page] == []
    fork = (ROOT / "docs/from-the-fork.md").read_text()
    known = all_flags(fork_flags.build_parser()) - {"--pipeline-model-parallel-size"}
    assert [flag for flag in sorted(known) if not re.search(rf"{flag}[ `]", fork)] == []


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_flag_that_a_page_names_exists(text: Path) -> None:
    ours = argparse.ArgumentParser()
    add_flags(ours)
    known = all_flags(ours) | all_flags(fork_flags.build_parser())
    named = set(re.findall(r"--zero-bubble-[a-z0-9]+(?:-[a-z0-9]+)*", text.read_text()))
    assert sorted(named - known) == []


def test_every_rule_of_the_tables_of_refusals_is_documented() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    flags = {option.name: f"`--zero-bubble-{option.flag}`" for option in DECISIONS}
    parts = [(flags[row.name], row.why.format(schedule="…", last="…"), row.remedy(as_given)) for row in EFFECTS]
    parts += [(row.one.words, row.why, row.remedy()) for row in EXCLUSIONS]
    parts += [(row.choice.subject, row.why, "" if row.is_set else row.remedy) for row in (*OPTIONS, *RANGES)]
    for row in parts:
        assert all(part in page for part in row), row


@pytest.mark.parametrize("option", refusals.HONOURED)
def test_no_schedule_refuses_an_option_that_is_honoured(option: str) -> None:
    """Wherever a configuration has it; pairs are of the model alone."""
    of_pairs = option == "overlap_moe_expert_parallel_comm"
    run = RunOptions(Setup(Named("dualpipe-v"), pairs=of_pairs))
    for place in range(1 if of_pairs else 3):
        parts = [SimpleNamespace(), SimpleNamespace(), SimpleNamespace()]
        setattr(parts[place], option, True)
        assert settle_options(parts, run) == [] and getattr(parts[place], option) is True


def test_every_package_that_refuses_something_is_in_a_table() -> None:
    grouped = [package for packages in refusals.GROUPS.values() for package in packages]
    assert len(grouped) == len(set(grouped))
    assert refusals.packages() <= set(grouped)


@pytest.mark.parametrize("name", models.MODELS)
def test_every_model_is_trained_where_the_page_says_so(name: str) -> None:
    """By a test that exists, and with choices that no check refuses."""
    for choice, (_, test) in models.MODELS[name].trained.items():
        file, _, row = test.partition("::")
        assert re.search(rf"\b{re.escape(row)}\b", (ROOT / file).read_text(encoding="utf-8")), test
        assert models.refusal_of(models.MODELS[name], choice) == "", choice
