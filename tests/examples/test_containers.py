"""Containers and Kubernetes: the commands in their files exist, and start what the dry run shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
MANIFEST = ROOT / "examples/kubernetes/pytorchjob.yaml"


def test_image_is_built_from_a_clean_clone() -> None:
    """Its steps are those of a checkout, and nothing that git ignores is copied."""
    steps = re.findall(r"^(?:RUN|CMD) .*?bash\W+(scripts/\w+\.sh)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert steps == ["scripts/setup_env.sh", "scripts/quickstart.sh"]
    assert all((ROOT / step).is_file() for step in steps)
    assert names(".dockerignore") == names(".gitignore") | {".git"}


def names(file: str) -> set[str]:
    lines = (ROOT / file).read_text().splitlines()
    return {line.removeprefix("**/").strip("/") for line in lines if line and line[0] != "#"}


def test_pods_start_the_nodes_of_one_job(tmp_path: Path) -> None:
    replicas = specification()["pytorchReplicaSpecs"]
    pods = [pod for kind in replicas.values() for pod in kind["replicas"] * [container(kind)]]
    commands = [started(pod, number, tmp_path) for number, pod in enumerate(pods)]
    assert [argument(command, "--node-rank") for command in commands] == ["0", "1", "2", "3"]
    assert {argument(command, "--nnodes") for command in commands} == {str(len(pods))}
    assert {argument(command, "--master-addr") for command in commands} == {"zero-bubble-master-0"}
    assert {argument(command, "--nproc-per-node") for command in commands} == {
        str(pod["resources"]["limits"]["nvidia.com/gpu"]) for pod in pods
    }


def test_the_job_passes_the_dry_run() -> None:
    (command,) = container(specification()["pytorchReplicaSpecs"]["Master"])["args"]
    done = run(f"{command} --dry-run --gpu h100 --gpu-memory 80GiB", 0, sys.executable)
    assert done.returncode == 0, done.stderr
    assert "4 nodes x 8 processes = 32 ranks" in done.stdout


def specification() -> Any:
    return yaml.safe_load(MANIFEST.read_text())["spec"]


def container(replica: Any) -> Any:
    (found,) = replica["template"]["spec"]["containers"]
    assert found["name"] == "pytorch" and found["command"] == ["bash", "-c"]
    return found


def started(pod: Any, number: int, folder: Path) -> list[str]:
    """The command that a pod starts, which an interpreter that only prints it stands for."""
    echo = folder / "python"
    echo.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    echo.chmod(0o755)
    done = run(pod["args"][0], number, str(echo))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def run(command: str, number: int, python: str) -> subprocess.CompletedProcess[str]:
    """Run a pod's command, with what the operator sets."""
    own = {"RANK": str(number), "WORLD_SIZE": "4", "MASTER_ADDR": "zero-bubble-master-0", "MASTER_PORT": "23456"}
    environment = {**os.environ, **own, "PYTHON": python}
    return subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def argument(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


@pytest.mark.parametrize("variable", ["RANK", "MASTER_ADDR"])
def test_a_missing_variable_is_named(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of the operator, the script says what it needs."""
    for name in ("RANK", "NODE_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    (command,) = container(specification()["pytorchReplicaSpecs"]["Master"])["args"]
    given = {"RANK": "1", "MASTER_ADDR": "node-0"}
    del given[variable]
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env=os.environ | given | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (
        done.returncode == 2
        and {"RANK": "NODE_RANK must be", "MASTER_ADDR": "MASTER_ADDR must"}[variable] in done.stderr
    )
