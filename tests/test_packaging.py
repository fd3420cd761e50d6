"""Tests of the package's metadata: accepted versions of megatron-core, and non-Python files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.helpers.ranks import RankPool

ROOT = Path(__file__).resolve().parents[1]
_READ = """
import json
from distutils.core import run_setup
found = run_setup("setup.py", stop_after="init")
extra = found.extras_require["train"]
print("\\n" + json.dumps({"requires": found.install_requires, "train": extra, "data": found.package_data}))
"""


def _setup(*arguments: str) -> str:
    """Run Python in the checkout without compiling ops; return the output."""
    environment = os.environ | {"ZB_BUILD": "none"}
    return subprocess.check_output([sys.executable, *arguments], cwd=ROOT, env=environment, text=True)


@pytest.fixture(scope="module")
def metadata() -> Any:
    return json.loads(_setup("-c", "import setuptools\n" + _READ).splitlines()[-1])


def known_minors(rank: int) -> list[str]:
    from megatron.zero_bubble.integration.patching.seams import MINORS

    return list(MINORS)


def test_requirement_accepts_exactly_the_known_megatron_core_releases(ranks: RankPool, metadata: Any) -> None:
    (minors,) = ranks.run(1, known_minors)
    (wanted,) = [r for r in map(Requirement, metadata["train"]) if r.name == "megatron-core"]
    numbers = [int(minor.removeprefix("0.")) for minor in minors]
    accepted = [n for n in range(40) if f"0.{n}.0" in wanted.specifier and f"0.{n}.7" in wanted.specifier]
    assert accepted == numbers
    assert "1.0.0" not in wanted.specifier


def test_planning_needs_neither_torch_nor_megatron_core(metadata: Any) -> None:
    assert metadata["requires"] == ["pyyaml"]


def test_py_typed_and_package_data_are_installed(metadata: Any, tmp_path: Path) -> None:
    _setup("setup.py", "--quiet", "build_py", "--build-lib", str(tmp_path))
    package = tmp_path / "megatron" / "zero_bubble"
    assert (package / "py.typed").is_file()
    assert not (tmp_path / "megatron" / "__init__.py").exists()
    for name, patterns in metadata["data"].items():
        folder = tmp_path.joinpath(*name.split("."))
        for pattern in patterns:
            assert list(folder.glob(pattern)), f"{name} installs no {pattern}"
