"""Tests of the package's metadata: accepted versions of megatron-core, and non-Python files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from setuptools.config.pyprojecttoml import load_file

from megatron.zero_bubble import __version__
from tests.helpers.ranks import RankPool

ROOT = Path(__file__).resolve().parents[1]
PROJECT = "https://example.org/zb"


def _setup(*arguments: str, **environment: str) -> None:
    """Run ``setup.py`` without compiling ops."""
    own = os.environ | {"ZB_BUILD": "none"} | environment
    subprocess.run([sys.executable, "setup.py", "--quiet", *arguments], cwd=ROOT, env=own, check=True, timeout=120)


def metadata_of(folder: Path, project: str, site: str = "") -> Message:
    """What a registry shows of a package whose project and site have these addresses."""
    _setup("egg_info", "--egg-base", str(folder), ZB_PROJECT_URL=project, ZB_SITE_URL=site)
    (file,) = folder.glob("*.egg-info/PKG-INFO")
    return message_from_string(file.read_text())


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Message:
    return metadata_of(tmp_path_factory.mktemp("with_address"), PROJECT)


def known_minors(rank: int) -> list[str]:
    from megatron.zero_bubble.integration.patching.seams import MINORS

    return list(MINORS)


def test_requirement_accepts_exactly_the_known_megatron_core_releases(ranks: RankPool, metadata: Message) -> None:
    (minors,) = ranks.run(1, known_minors)
    (wanted,) = [r for r in requirements(metadata) if r.name == "megatron-core"]
    numbers = [int(minor.removeprefix("0.")) for minor in minors]
    accepted = [n for n in range(40) if f"0.{n}.0" in wanted.specifier and f"0.{n}.7" in wanted.specifier]
    assert accepted == numbers
    assert "1.0.0" not in wanted.specifier


def requirements(metadata: Message) -> list[Requirement]:
    return [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]


def test_planning_needs_neither_torch_nor_megatron_core(metadata: Message) -> None:
    assert [r.name for r in requirements(metadata) if r.marker is None] == ["pyyaml"]


def test_a_registrys_page_has_no_dead_links(metadata: Message) -> None:
    page = metadata.get_payload()
    assert isinstance(page, str)
    targets = re.findall(r"\]\(([^)\s]+)\)", page)
    assert len(targets) > 10
    for target in targets:
        address, _, path = target.partition(f"/v{__version__}/")
        if address.startswith(PROJECT):
            assert address in (f"{PROJECT}/blob", f"{PROJECT}/raw") and (ROOT / path.partition("#")[0]).exists(), target
        else:
            assert target.startswith("https://arxiv.org/"), target
    assert all(f", {PROJECT}" in line for line in metadata.get_all("Project-URL", []))


def test_a_registrys_page_opens_the_playground_of_the_site(tmp_path: Path) -> None:
    metadata = metadata_of(tmp_path, PROJECT, "https://zb.example.org/site/")
    at = "https://zb.example.org/site/playground/index.html"
    assert f"[playground, in your browser]({at})" in str(metadata.get_payload())
    assert f"Playground, {at}" in metadata.get_all("Project-URL", [])


def test_without_an_address_a_registrys_page_has_no_relative_links(tmp_path: Path) -> None:
    metadata = metadata_of(tmp_path, "")
    assert set(re.findall(r"\]\(([^/]*)", str(metadata.get_payload()))) == {"https:"}
    assert "[frameworks]" not in str(metadata.get_payload()) and metadata.get_all("Project-URL") is None


def test_py_typed_and_package_data_are_installed(tmp_path: Path) -> None:
    data = load_file(ROOT / "pyproject.toml")["tool"]["setuptools"]["package-data"]
    _setup("build_py", "--build-lib", str(tmp_path))
    package = tmp_path / "megatron" / "zero_bubble"
    assert (package / "py.typed").is_file()
    assert not (tmp_path / "megatron" / "__init__.py").exists()
    for name, patterns in data.items():
        folder = tmp_path.joinpath(*name.split("."))
        for pattern in patterns:
            assert list(folder.glob(pattern)), f"{name} installs no {pattern}"
