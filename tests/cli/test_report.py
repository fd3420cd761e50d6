"""``zero-bubble report`` and what an installation without the extra ``train`` answers."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).parents[2] / "scripts/pretrain_gpt.py")
WITHOUT_TORCH = "import sys; sys.modules['torch'] = sys.modules['megatron.core'] = None; "


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


def command(*arguments: str, before: str = "") -> str:
    code = f"{before}import sys; from megatron.zero_bubble.__main__ import main; sys.exit(main(sys.argv[1:]))"
    done = python(code, *arguments)
    # A torch built with CUDA mentions that a machine has no driver; the report itself writes no warning.
    ours = [line for line in done.stderr.splitlines() if "No CUDA runtime is found" not in line]
    assert (done.returncode, ours) == (0, [])
    return done.stdout


def test_report_names_versions_and_seams() -> None:
    facts = json.loads(command("report", "--format", "json"))
    import torch

    assert facts["torch"] == metadata.version("torch")
    assert facts["megatron-core names (seams)"].startswith("all found: ")
    assert facts["changed functions"] == "none"
    assert facts["CUDA"] == (torch.version.cuda or "torch was built without CUDA")
    assert facts["to do"] == []
    assert {"megatron-core", "planner", "weight gradients", "device", "apex"} <= set(facts)


def test_report_tells_of_an_unknown_megatron_core() -> None:
    before = (
        "import warnings; warnings.simplefilter('ignore'); import megatron.core; megatron.core.__version__ = '0.99.0'; "
    )
    fact, to_do = (line for line in command("report", before=before).splitlines() if "(seams)" in line)
    assert "broken: SeamError" in fact and "0.99.0" in fact
    assert to_do == "- megatron-core names (seams): fix what the error names"


@pytest.mark.full
def test_report_does_not_miss_what_only_transformer_engine_has() -> None:
    """In 0.13, its own module has the function that captures graphs; later, megatron-core's has it, too."""
    before = (
        "import warnings; warnings.simplefilter('ignore'); from dataclasses import replace; "
        "import megatron.zero_bubble; megatron.zero_bubble.use_cpu_ranks(); "
        "from megatron.zero_bubble.integration.patching import seams; own = seams.installed_seams(); "
        "elsewhere = replace(own, graphed=replace(own.graphed, module='transformer_engine.pytorch')); "
        "seams.installed_seams = lambda: elsewhere; "
    )
    facts = json.loads(command("report", "--format", "json", before=before))
    assert facts["megatron-core names (seams)"].startswith("all found: ")


def test_report_works_without_torch() -> None:
    facts, to_do = (part.splitlines() for part in command("report", before=WITHOUT_TORCH).split("\n\n"))
    assert facts[-1].split()[:3] == ["training", "not", "available"]
    assert to_do == ["To do:", "- training: to train, run pip install 'megatron-zero-bubble[train]'"]


@pytest.mark.full
def test_report_says_what_to_do_without_compiled_parts() -> None:
    loops = "megatron.zero_bubble.core.search._planner"
    before = (
        f"import sys, logging; sys.modules['{loops}'] = None; logging.disable(); "
        "from megatron.zero_bubble.engine.kernels import implementation; "
        "implementation._load = lambda: 'not built'; "
    )
    found = json.loads(command("report", "--format", "json", before=before))
    assert found["planner"].startswith("Python") and found["weight gradients"].startswith("plain torch (not built)")
    assert [line.partition(":")[0] for line in found["to do"]] == ["planner", "weight gradients"]
    assert all("a C++ compiler" in line and "--no-build-isolation" in line for line in found["to do"])


def test_training_without_torch_names_the_extra() -> None:
    done = python(WITHOUT_TORCH + "import megatron.zero_bubble; megatron.zero_bubble.apply('zb-h1')")
    assert "training needs torch and megatron.core" in done.stderr
    assert "[train]" in done.stderr
    code = "import runpy; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    done = python(WITHOUT_TORCH + code, SCRIPT, "--mock-data")
    assert done.returncode == 2
    assert "[train]" in done.stderr
    assert "Traceback" not in done.stderr


def test_report_survives_a_torch_that_does_not_load() -> None:
    finder = "class Broken:\n def find_spec(s, name, *_):\n  if name == 'torch': raise OSError('libcudart.so')\n"
    code = f"import sys\n{finder}sys.meta_path.insert(0, Broken())\n"
    broken = [line.split()[0] for line in command("report", before=code).splitlines() if "libcudart.so" in line]
    assert broken == ["device", "megatron-core"]
