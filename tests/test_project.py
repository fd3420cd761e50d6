"""The files around the code: they agree with each other and with the package."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.zero_bubble import __version__

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted(path.relative_to(ROOT) for path in ROOT.glob(".github/workflows/*.yml"))
YAML_FILES = ["CITATION.cff", ".pre-commit-config.yaml", *map(str, WORKFLOWS)]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_readme_is_short_and_begins_with_what_to_try() -> None:
    text = re.sub("<!--.*?-->", "", read("README.md"))
    assert len(text.splitlines()) <= 90
    assert num_words(text) <= 800
    assert num_words(text.partition("```bash")[0]) <= 60


def num_words(text: str) -> int:
    return sum(re.search(r"\w", word) is not None for word in text.split())


def test_the_pages_are_short_to_read() -> None:
    """Words that someone wrote: outside of generated parts, code and comments."""
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")]
    assert sum(num_words(by_hand(page)) for page in pages) <= 40_000


def by_hand(page: str) -> str:
    page = re.sub(r"<!-- generated:.*?<!-- end -->", "", page, flags=re.DOTALL)
    page = re.sub(r"^( *)```.*?^\1```", "", page, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"<!--.*?-->", "", page, flags=re.DOTALL)


def test_words_by_hand_are_counted_outside_of_what_is_generated() -> None:
    page = "# Title\n\n<!-- generated: x -->a b<!-- end --> two words\n\n```bash\nrun it\n```\n| - | 3 |\n"
    assert num_words(by_hand(page)) == 4


def test_readme_states_gpu_results_first() -> None:
    _, _, gains = read("README.md").partition("## What it gained\n")
    assert gains.lstrip().startswith("- <!-- generated: gpu-words -->")


def test_readme_has_the_two_commands() -> None:
    assert re.search(r"^bash scripts/quickstart\.sh\b", read("README.md"), re.MULTILINE)
    assert re.search(r"^bash scripts/test\.sh\b", read("README.md"), re.MULTILINE)


def test_version_is_the_same_everywhere() -> None:
    citation: Any = yaml.safe_load(read("CITATION.cff"))
    archive = json.loads(read(".zenodo.json"))  # from which Zenodo makes the record, and the DOI, of a release
    assert citation["version"] == archive["version"] == __version__
    assert (citation["title"], citation["abstract"]) == (archive["title"], archive["description"])
    assert all(f'"{word}"' in read("pyproject.toml") for word in archive["keywords"])
    assert f"\n## {__version__}\n" in read("CHANGELOG.md")


@pytest.mark.parametrize("name", YAML_FILES)
def test_scripts_named_in_yaml_files_exist(name: str) -> None:
    text = read(name)
    assert yaml.safe_load(text)
    for script in re.findall(r"\b(?:scripts|\.ci)/[\w./]*\w", text):
        assert (ROOT / script).is_file(), f"{name} names {script}"


def test_files_that_prove_the_promises_exist() -> None:
    """``scripts/test.sh --quick`` runs the files that tests/README.md names in backquotes."""
    named = re.findall(r"\[`(tests/[a-z_/]*\.py)`\]\((.*)\)", read("tests/README.md"))
    assert len(named) >= 12 and len(named) == read("tests/README.md").count("[`")
    assert all(f"tests/{link}" == file and (ROOT / file).is_file() for file, link in named), named


def test_ci_covers_every_supported_python() -> None:
    workflow: Any = yaml.safe_load(read(".github/workflows/ci.yml"))
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == ["3.10", "3.11", "3.12", "3.13"]
    assert 'requires-python = ">=3.10"' in read("pyproject.toml")
